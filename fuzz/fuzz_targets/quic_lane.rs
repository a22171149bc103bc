#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    comm_quic::fuzzing::quic_lane(bytes);
});
