//! What collectives are timed over: the transports that training knows, and those that exist to be measured only.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use comm_core::null::NullCommunicator;
use comm_core::{Control, Error};
use gpt2::trainer::Session;
use gpt2::transports::{self, TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

/// A rung of the ladder of transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Rung {
    /// One that training knows, too.
    Trained(TransportKind),
    /// Nothing is sent: what the call itself costs, the floor of all others.
    Null,
    /// QUIC without packet protection: what encryption costs. Needs the feature `unprotected`.
    QuicUnprotected,
}

impl Rung {
    pub(crate) const LOCAL: Rung = Rung::Trained(TransportKind::Local);
    pub(crate) const TCP_RAW: Rung = Rung::Trained(TransportKind::TcpRaw);

    /// Every rung that this build has or could have, those that need nothing first.
    pub(crate) fn all() -> Vec<Rung> {
        let mut all = vec![Rung::Null];
        all.extend(TransportKind::ALL.into_iter().map(Rung::Trained));
        if cfg!(feature = "unprotected") {
            all.push(Rung::QuicUnprotected);
        }
        all
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Rung::Trained(kind) => kind.name(),
            Rung::Null => "null",
            Rung::QuicUnprotected => "quic-unprotected",
        }
    }

    /// Why this build on this machine cannot use it; `None` if it can.
    pub(crate) fn missing(self) -> Option<String> {
        match self {
            Rung::Trained(kind) => kind.missing(),
            Rung::Null => None,
            Rung::QuicUnprotected if cfg!(feature = "unprotected") => None,
            Rung::QuicUnprotected => {
                Some("this build lacks the feature `unprotected`; build with --features unprotected".into())
            }
        }
    }

    /// Connects this rank.
    pub(crate) fn connect(self, control: Arc<dyn Control>, options: &TransportOptions) -> Result<Session, Error> {
        match self {
            Rung::Trained(kind) => transports::connect(kind, control, options),
            Rung::Null => {
                let comm = NullCommunicator::new(control.rank(), control.world_size(), options.lanes)?;
                Ok(Session {
                    comm: Arc::new(comm),
                    control,
                    counters: None,
                    facts: Vec::new(),
                    timeout: options.timeout,
                    ranks_in_process: 1,
                })
            }
            #[cfg(feature = "unprotected")]
            Rung::QuicUnprotected => {
                let deadline = comm_core::Deadline::after(options.timeout);
                let quic = transports::quic_options(options)?;
                let transport = comm_quic::UnprotectedQuic::connect(&*control, &quic, deadline)?;
                Ok(transports::session(transport, control, options, 1))
            }
            #[cfg(not(feature = "unprotected"))]
            Rung::QuicUnprotected => Err(Error::Unsupported {
                what: "the transport `quic-unprotected`".into(),
                why: self.missing().unwrap_or_default(),
            }),
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Rung {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == Rung::QuicUnprotected.name() {
            return Ok(Rung::QuicUnprotected);
        }
        if name == Rung::Null.name() {
            return Ok(Rung::Null);
        }
        name.parse().map(Rung::Trained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_they_print() {
        for rung in Rung::all().into_iter().chain([Rung::QuicUnprotected]) {
            assert_eq!(rung.to_string().parse::<Rung>(), Ok(rung));
        }
        assert!("quick".parse::<Rung>().unwrap_err().contains("quic"));
    }

    #[test]
    fn what_a_build_lacks_says_how_to_get_it() {
        let missing = Rung::QuicUnprotected.missing();
        assert_eq!(missing.is_none(), cfg!(feature = "unprotected"));
        assert!(missing.is_none_or(|why| why.contains("--features unprotected")));
    }
}
