//! The suite that every communicator passes, on a stand-in for NCCL and the CUDA driver: it shows that this crate makes the right calls
//! in the right order, with its deadlines and its aborts, and nothing of NCCL itself. `conformance` runs the same on a GPU.

mod suite;

use std::process::ExitCode;

use comm_core::conformance::{Suite, main_of};
use comm_core::{Result, local};
use comm_nccl::NcclOptions;

fn main() -> ExitCode {
    let group = |ranks: usize| -> Result<Vec<comm_core::conformance::Connector>> {
        let connector = |rank: local::LocalRank| -> comm_core::conformance::Connector {
            let control = rank.control;
            Box::new(move || suite::connect(control, NcclOptions::default().on_stand_in().with_lanes(suite::LANES)))
        };
        Ok(local::group(ranks, suite::LANES).into_iter().map(connector).collect())
    };
    let suite = Suite::of_threads("nccl-stand-in", group).with_ranks(&[1, 2, 3], &[]);
    main_of(vec![suite::without_what_nccl_has_not(suite)])
}
