#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    predict::fuzzing::chakra_trace(bytes);
});
