//! Where the ranks of a job meet.

use std::fmt;
use std::path::PathBuf;

use crate::addresses::check_address;
use crate::error::{Error, Result};

/// Where rank 0 listens and the others dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An address or name of rank 0's machine. Rank 0 binds exactly this, not every interface: of a name all addresses that are
    /// its machine's, those of loopback only where there are no others.
    Tcp {
        /// An address, or a name that all ranks resolve to an address of rank 0's machine.
        host: String,
        /// The port.
        port: u16,
    },
    /// For ranks of one machine: rank 0 binds a free port of 127.0.0.1, or of ::1 where that is not there, and writes it into this
    /// file.
    File(PathBuf),
}

impl Address {
    /// Parses `host:port`, `[v6]:port` or `file:/path`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub fn parse(text: &str) -> Result<Self> {
        if let Some(path) = text.strip_prefix("file:") {
            if path.is_empty() {
                return Err(Error::invalid("the address \"file:\" names no file"));
            }
            return Ok(Address::File(path.into()));
        }
        let understood = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
        match understood {
            Some((host, port)) if port != 0 => Self::tcp(host, port),
            _ => Err(Error::invalid(format!("{text:?} is not an address: host:port or file:/path is expected"))),
        }
    }

    /// `host` may be an IPv6 address in brackets.
    pub(super) fn tcp(host: &str, port: u16) -> Result<Self> {
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() || host.contains(['[', ']']) {
            return Err(Error::invalid(format!("{host:?} is not an address or a name of a machine")));
        }
        host.parse().map_or(Ok(()), check_address)?;
        Ok(Address::Tcp { host: host.into(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}
