//! The suite that every transport passes, for QUIC without packet protection.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use comm_core::{Deadline, Mesh, MeshOptions, conformance};
use comm_quic::{QuicOptions, UnprotectedQuic};

fn main() -> ExitCode {
    conformance::main("quic-unprotected", |control, lanes| {
        let options = QuicOptions { lanes, ..QuicOptions::default() };
        let transport = UnprotectedQuic::connect(&*control, &options, Deadline::after(Duration::from_secs(30)))?;
        Ok(Arc::new(Mesh::new(transport, control, MeshOptions::default())?))
    })
}
