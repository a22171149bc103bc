#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    comm_core::fuzzing::host_list(bytes);
});
