//! The conformance suite on both transports of this crate, as threads and as processes.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use comm_core::conformance::{Suite, main_of};
use comm_core::{Deadline, Mesh, MeshOptions};
use comm_tcp::{RawTcpTransport, TcpOptions, ZmqTransport};

fn main() -> ExitCode {
    let deadline = || Deadline::after(Duration::from_secs(30));
    let options = |lanes| TcpOptions { lanes, ..TcpOptions::default() };
    main_of(vec![
        Suite::new("tcp-raw", move |control, lanes| {
            let transport = RawTcpTransport::connect(&*control, &options(lanes), deadline())?;
            Ok(Arc::new(Mesh::new(transport, control, MeshOptions::default())))
        }),
        Suite::new("tcp", move |control, lanes| {
            let transport = ZmqTransport::connect(&*control, &options(lanes), deadline())?;
            Ok(Arc::new(Mesh::new(transport, control, MeshOptions::default())))
        }),
    ])
}
