#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    comm_core::fuzzing::ranks_on_a_machine(bytes);
});
