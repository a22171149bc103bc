//! The suite that every communicator passes, on NCCL itself: a process a rank. Without a GPU all of it is ignored, with the reason.

mod suite;

use std::process::ExitCode;

use comm_core::conformance::{Suite, main_of};
use comm_nccl::NcclOptions;

fn main() -> ExitCode {
    if let Err(error) = comm_nccl::share_gpu() {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    let connect = |control, lanes| suite::connect(control, NcclOptions::default().with_lanes(lanes));
    // Ranks of one process would all have its one GPU.
    let suite = suite::without_what_nccl_has_not(Suite::new("nccl", connect)).with_ranks(&[], &[1, 2, 4]);
    let suite = suite
        .without("rounding/", "NCCL rounds 16-bit floats after every step of a reduction")
        .without("nan/", "which of NaN and a number is the greater is up to NCCL");
    main_of(vec![match comm_nccl::available() {
        Ok(()) => suite,
        Err(error) => suite.without("", &error.to_string()),
    }])
}
