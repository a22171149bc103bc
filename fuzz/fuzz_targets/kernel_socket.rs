#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    comm_tcp::fuzzing::kernel_socket(bytes);
});
