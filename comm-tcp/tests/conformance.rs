//! The conformance suite on both transports, ZeroMQ behind each gate, without one, and over IPC.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use comm_core::conformance::{Suite, main_of};
use comm_core::{Communicator, Control, Deadline, Mesh, MeshOptions, Result, Transport};
use comm_tcp::{Gate, RawTcpTransport, TcpOptions, ZmqTransport};

fn main() -> ExitCode {
    main_of(vec![
        suite("tcp", |control, options| ZmqTransport::connect(control, &options, soon())),
        suite("tcp-behind-relay", |control, options| {
            ZmqTransport::connect(control, &TcpOptions { gate: Gate::Relay, ..options }, soon())
        })
        .with_ranks(&[3], &[2])
        .with_one_type(),
        suite("tcp-without-gate", |control, options| {
            ZmqTransport::connect(control, &TcpOptions { gate: Gate::Off, ..options }, soon())
        })
        .with_ranks(&[3], &[2])
        .with_one_type(),
        suite("tcp-ipc", |control, options| {
            ZmqTransport::connect(control, &TcpOptions { ipc: true, ..options }, soon())
        })
        .with_ranks(&[2], &[3])
        .with_one_type(),
        suite("tcp-raw", |control, options| RawTcpTransport::connect(control, &options, soon()))
            .with_crowd(64, &["all_reduce/f32/sum", "all_to_all/f32", "barrier/waits_for_the_last"]),
    ])
}

fn suite<T: Transport>(
    name: &str,
    connect: impl Fn(&dyn Control, TcpOptions) -> Result<T> + Copy + Send + Sync + 'static,
) -> Suite {
    Suite::new(name, move |control, lanes| {
        let transport = connect(&*control, TcpOptions { lanes, ..TcpOptions::default() })?;
        Ok(Arc::new(Mesh::new(transport, control, MeshOptions::default())?) as Arc<dyn Communicator>)
    })
    .with_transport(move |rank, lanes| {
        Ok(Arc::new(connect(&*rank.control, TcpOptions { lanes, ..TcpOptions::default() })?))
    })
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}
