//! The suite that every communicator passes, on GPUs that are not there: the driver and NCCL are libraries that are loaded, ranks are
//! processes, and what was put into a stream is done no sooner than somebody waits for it. It shows that memory is not touched before the
//! stream has come there, and that types, factors and functions are NCCL's; nothing of NCCL itself.
//!
//! Needs a C++ compiler; without one it says that it is skipped, or fails with `TEST_NEEDS_CXX` set.

#![allow(unreachable_pub, reason = "what another crate's tests use too")]

mod gpu;
mod suite;

use std::process::{Command, ExitCode};

use comm_core::conformance::{Suite, main_of};
use comm_nccl::NcclOptions;

use gpu::Gpus;

fn main() -> ExitCode {
    if !cfg!(target_os = "linux") {
        println!("skipped: NCCL is for Linux");
        return ExitCode::SUCCESS;
    }
    if std::env::var_os("STAND_IN_COMPUTES").is_some() {
        let connect = |control, lanes| suite::connect(control, NcclOptions::default().with_lanes(lanes));
        let suite = suite::without_what_nccl_has_not(Suite::new("nccl-late", connect)).with_ranks(&[], &[1, 2, 4]);
        return main_of(vec![suite.without("nan/", "which of NaN and a number is the greater is up to NCCL")]);
    }
    // The loader looks for libraries where the environment said when the process began.
    let Some(gpus) = Gpus::new() else { return ExitCode::SUCCESS };
    let gpus = gpus.with_both_names();
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    gpus.equip(again.args(std::env::args_os().skip(1)), 4, "late");
    let status = again.status().expect("this program");
    if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
