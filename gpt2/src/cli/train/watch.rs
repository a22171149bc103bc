//! How a run is watched.

use std::net::SocketAddr;

use clap::Args;

use super::super::metrics::{self, Metrics, RunFacts};
use super::super::{CliError, say};
use super::TrainArgs;
use crate::trainer::Restarts;

#[derive(Clone, Debug, Args)]
pub(super) struct WatchArgs {
    /// Print every so many steps.
    #[arg(long, default_value_t = 10)]
    pub(super) log_every: u64,
    /// Answer HTTP on rank 0: /metrics in Prometheus' text format, and /health, which is 503 when no step has ended for long. For the first step
    /// of a start, also a restart, it allows 30 minutes until training begins, and 30 minutes from there. Whoever can reach the port can read
    /// it; port 0 takes a free one, which is printed.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
    /// Usual times of a step without one after which /health says so, but never less than 10 s. Validations and checkpoints count too.
    #[arg(long, value_name = "TIMES", default_value_t = 20.0)]
    unhealthy_after: f64,
}

impl WatchArgs {
    pub(super) fn check(&self) -> Result<(), CliError> {
        // More than that no clock counts.
        if (1.0..=1e6).contains(&self.unhealthy_after) {
            return Ok(());
        }
        Err(format!("--unhealthy-after {} must lie between 1 and a million", self.unhealthy_after).into())
    }

    /// # Errors
    /// Nobody can listen where answers are asked for.
    pub(super) fn check_port(&self) -> Result<(), CliError> {
        self.metrics.map_or(Ok(()), |address| metrics::listen(address).map(drop))
    }

    /// Begins to answer, where that is asked for, and says where.
    pub(super) fn serve(&self, args: &TrainArgs) -> Result<Option<Metrics>, CliError> {
        let Some(address) = self.metrics else { return Ok(None) };
        let labels = vec![
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("commit", crate::build::COMMIT.unwrap_or_default().to_owned()),
            ("strategy", args.strategy.to_string()),
            ("transport", args.transport.to_string()),
            ("device", args.device.to_string()),
        ];
        let restarts = Restarts { count: args.restarts, steps_lost: args.steps_lost };
        let metrics = Metrics::serve(address, RunFacts { labels, restarts, unhealthy_after: self.unhealthy_after })?;
        say(format_args!("metrics: http://{}/metrics", metrics.address()));
        Ok(Some(metrics))
    }
}
