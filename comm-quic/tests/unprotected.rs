//! The suite that every transport passes, for QUIC without packet protection.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use comm_core::conformance::{Suite, main_of};
use comm_core::{Control, Deadline, Mesh, MeshOptions, Result};
use comm_quic::{QuicOptions, QuicTransport, UnprotectedQuic};

fn main() -> ExitCode {
    let suite = Suite::new("quic-unprotected", |control, lanes| {
        Ok(Arc::new(Mesh::new(connect(&*control, lanes)?, control, MeshOptions::default())?))
    });
    main_of(vec![suite.with_transport(|rank, lanes| Ok(Arc::new(connect(&*rank.control, lanes)?)))])
}

fn connect(control: &dyn Control, lanes: usize) -> Result<QuicTransport> {
    let options = QuicOptions { lanes, ..QuicOptions::default() };
    UnprotectedQuic::connect(control, &options, Deadline::after(Duration::from_secs(30)))
}
