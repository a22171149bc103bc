//! Which addresses and ports the listeners of a rank take.

use super::launchers::Vars;
use crate::addresses::PortRange;
use crate::error::{Error, Result};
use crate::interfaces::Bind;

/// The variable that names interfaces or an address.
const IFNAME: &str = "COMM_IFNAME";

/// The variable that names ports.
const PORT_RANGE: &str = "COMM_PORT_RANGE";

/// Which addresses and ports the listeners of a rank take. Ranks may differ in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Where listeners for data are bound, of transports that are given no address; `None` for the address by which the rank reaches rank
    /// 0. Rank 0's machine may have a name that leads to loopback there: then its control port is bound there, too.
    pub bind: Option<Bind>,
    /// Their ports; `None` for any that are free. The control port of rank 0 is the one of the job's address. Connections that are accepted have
    /// the port of their listener; those of an earlier start that linger do not keep another from listening there.
    pub ports: Option<PortRange>,
    /// Whether the launcher says that the ranks are on several machines: rank 0 does not listen on loopback then, unless the job's address is
    /// one of loopback by its numbers. torchrun does not say it: several of its agents may be on one machine.
    pub across_hosts: bool,
}

impl Network {
    pub(super) fn of(vars: Vars<'_>, across_hosts: bool) -> Result<Network> {
        let named = |name: &str, error: Error| Error::invalid(format!("{name}: {error}"));
        let bind: Option<Bind> =
            vars.text(IFNAME).map(|text| text.parse().map_err(|error| named(IFNAME, error))).transpose()?;
        let ports = vars.text(PORT_RANGE);
        let ports: Option<PortRange> =
            ports.map(|text| text.parse().map_err(|error| named(PORT_RANGE, error))).transpose()?;
        Ok(Network { bind, ports, across_hosts })
    }
}
