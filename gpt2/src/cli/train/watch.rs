//! How a run is watched.

use std::net::SocketAddr;

use clap::Args;

use super::super::metrics::{self, Metrics, RunFacts};
use super::super::{CliError, say};
use super::TrainArgs;
use crate::trainer::Restarts;

#[derive(Clone, Debug, Args)]
pub(super) struct WatchArgs {
    /// Steps between two printed lines.
    #[arg(long, default_value_t = 10)]
    pub(super) log_every: u64,
    /// Address and port on which rank 0 answers HTTP: /metrics, in Prometheus' text format, and /health, which answers 503 if no step has ended for
    /// too long (see --unhealthy-after). After each start or restart, 30 minutes are allowed until training begins, and 30 minutes more for the first
    /// step. Anyone who can reach the port can read this. Port 0 takes a free port, which is printed.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
    /// How long, as a multiple of the usual step time, no step may end before /health answers 503; at least 10 s. Time for validations and
    /// checkpoints counts as well.
    #[arg(long, value_name = "TIMES", default_value_t = 20.0)]
    unhealthy_after: f64,
}

impl WatchArgs {
    pub(super) fn check(&self) -> Result<(), CliError> {
        // More than that no clock counts.
        if (1.0..=1e6).contains(&self.unhealthy_after) {
            return Ok(());
        }
        Err(format!("--unhealthy-after {} must be from 1 to 1000000", self.unhealthy_after).into())
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
