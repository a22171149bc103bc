//! An all-reduce between processes, over a transport named on the command line:
//!
//! ```text
//! cargo run -p gpt2 --example all_reduce -- quic
//! ```
//!
//! Under `srun`, `mpirun` or `torchrun` it is a rank of their job; started by hand it starts three of itself.

use std::time::Duration;

use comm_core::control::TcpControl;
use comm_core::launch::Launch;
use comm_core::{CommunicatorExt, Deadline, Job, ReduceOp};
use gpt2::transports::{TransportKind, TransportOptions, connect};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or("tcp".into());
    let transport: TransportKind = name.parse()?;
    let Some(job) = Job::from_env()? else {
        let launch = Launch { args: vec![name.into()], ..Launch::new(std::env::current_exe()?, 3) };
        std::process::exit(launch.run()?.code);
    };
    let control = TcpControl::connect(&job, &[], Deadline::after(Duration::from_secs(30)))?;
    let comm = connect(transport, control, &TransportOptions::default())?.comm;
    let mut values = vec![job.rank as f32; 4];
    comm.all_reduce(&mut values, ReduceOp::Sum)?;
    println!("sum of the ranks over {}: {values:?}", comm.name());
    comm.finish(Duration::from_secs(10))?;
    Ok(())
}
