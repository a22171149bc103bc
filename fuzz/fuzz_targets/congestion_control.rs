#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    comm_quic::fuzzing::congestion_control(bytes);
});
