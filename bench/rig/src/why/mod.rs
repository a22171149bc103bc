//! Why a run was as fast as it was: what the kernel and QUIC say of its connections, what its interface carried, and which threads took
//! processor time. All of it is read from outside of the transports, at the first step and after the last.

mod cpu;
mod figures;
mod interface;
mod quic;
mod tcp;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use figures::{Connection, Interface, Network};
pub use quic::quic_figures;

/// Gives the connections of a transport that brings its own protocol, with counters since they were made.
pub type Figures = Arc<dyn Fn() -> Vec<Connection> + Send + Sync>;

/// What to look at.
#[derive(Clone)]
pub struct Scope {
    /// Name of the network interface that the transport uses, in this thread's network namespace.
    pub interface: String,
    /// Other ranks use it too, so that its counters say nothing of this one.
    pub shared_interface: bool,
    /// Where the ranks meet. TCP connections from or to this port are the control plane's, and are left out.
    pub control_port: Option<u16>,
    /// QUIC's connections, which the kernel does not know.
    pub quic: Option<Figures>,
}

/// Looks at this process, which is one rank, from the first step on.
pub struct Probe {
    scope: Scope,
    /// The thread that trains.
    thread: Option<u32>,
    began: Sample,
}

/// Everything at one moment.
struct Sample {
    interface: Option<Interface>,
    /// By a name that stays with the connection.
    connections: BTreeMap<String, Connection>,
    /// Why TCP's are not among them.
    missing: Option<String>,
    cpu: cpu::Cpu,
}

impl Probe {
    /// To be called right before the first step, by the thread that trains: what it computes counts as `training`, wherever it comes
    /// from. Takes a fraction of a millisecond.
    pub fn start(scope: Scope) -> Self {
        let thread = cpu::this_thread();
        // Processor time last, and first at the end: looking is not part of the run.
        let (interface, (connections, missing)) = (scope.interface_counters(), scope.connections());
        let began = Sample { interface, connections, missing, cpu: cpu::Cpu::now() };
        Probe { scope, thread, began }
    }

    /// To be called after the last step, while the connections still stand: what happened since the start, and how the connections are
    /// now. Those that have ended meanwhile are not among them.
    pub fn finish(self) -> Network {
        let Probe { scope, thread, began } = self;
        let cpu = cpu::Cpu::now();
        let (interface, (connections, missing)) = (scope.interface_counters(), scope.connections());
        let connections: Vec<Connection> =
            connections.into_iter().map(|(name, now)| since(now, began.connections.get(&name))).collect();
        let missing = connections.is_empty().then(|| {
            let nothing = || "this process has no connection but the control plane's".to_string();
            missing.or(began.missing).unwrap_or_else(nothing)
        });
        let interface = interface.zip(began.interface).map(|(now, before)| interface::since(now, before));
        Network { interface, connections, cpu_s: cpu.since(&began.cpu, thread), missing }
    }
}

impl Scope {
    fn interface_counters(&self) -> Option<Interface> {
        if self.shared_interface { None } else { interface::counters(&self.interface) }
    }

    /// All connections by name, and why TCP's are missing.
    fn connections(&self) -> (BTreeMap<String, Connection>, Option<String>) {
        let own = self.quic.iter().flat_map(|figures| figures());
        let mut all: BTreeMap<String, Connection> =
            own.map(|connection| (format!("{} {}", connection.protocol, connection.peer), connection)).collect();
        match tcp::connections(self.control_port) {
            Ok(connections) => {
                all.extend(connections);
                (all, None)
            }
            Err(why) => (all, Some(why)),
        }
    }
}

/// What a connection did since it was as it was `before`; since it was made if there is none.
fn since(mut now: Connection, before: Option<&Connection>) -> Connection {
    if let Some(before) = before {
        for (count, before) in [
            (&mut now.bytes_sent, before.bytes_sent),
            (&mut now.packets_sent, before.packets_sent),
            (&mut now.retransmitted_packets, before.retransmitted_packets),
            (&mut now.retransmitted_bytes, before.retransmitted_bytes),
        ] {
            *count = count.saturating_sub(before);
        }
    }
    now
}

#[cfg(test)]
mod tests;
