//! Links between ranks: network namespaces joined by virtual cables or by an emulator, and jobs whose ranks live in them.
//!
//! A [`Profile`] says what a link is like, a [`TestNetwork`] is one. Its namespaces are made by `ip` and `tc`, which takes root or a user
//! namespace ([`gain_namespaces`]), and are taken away when it is dropped; what a killed run has left behind, the next one takes away.

mod emulator;
mod enter;
mod find;
mod hub;
mod network;
mod options;
mod pipe;
mod place;
mod privileges;
mod probe;
mod profile;
mod profile_file;
mod rate;
mod tools;
mod units;

use std::net::Ipv4Addr;

pub use emulator::{EmulateArgs, Loss, PipeSpec, run_emulator};
pub use enter::{EnterArgs, enter};
pub use network::TestNetwork;
pub use options::LinkOptions;
pub use pipe::Pipe;
pub use place::JobEndpoints;
pub use privileges::gain_namespaces;
pub use probe::{Probe, ProbeArgs, run_probe};
pub use profile::{Carrier, Pipes, Profile};
pub use rate::{Rate, RateLimit};

/// The interface at each end.
pub const INTERFACE: &str = "link0";

/// Smallest and largest packets that the kernel and all transports can do with.
pub const MTU: std::ops::RangeInclusive<u32> = 1280..=65_535;

/// Most ends of a link.
pub const MAX_ENDS: usize = 200;

const SUBNET: &str = "10.77.0.0/24";
const PREFIX: u8 = 24;

/// The address of an end. The same for every link: nobody else is in its namespaces.
fn address(end: usize) -> Ipv4Addr {
    // There are at most `MAX_ENDS`.
    Ipv4Addr::new(10, 77, 0, u8::try_from(end + 1).unwrap_or(u8::MAX))
}
