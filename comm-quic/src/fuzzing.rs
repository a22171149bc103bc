//! Entry points for fuzzing (feature `fuzzing`): see [`comm_core::fuzzing`].

pub use comm_core::fuzzing::{Target, Verdict};

pub use crate::interface::fuzzing::*;
pub use crate::message::fuzzing::*;
pub use crate::rendezvous::fuzzing::*;
pub use crate::tls::fuzzing::*;

use crate::congestion::Congestion;

/// The decoders of this crate.
pub fn targets() -> Vec<Target> {
    let own = Target::new("congestion control", congestion_control, || {
        ["auto", "newreno", "fixed:2097152"].iter().map(|name| name.as_bytes().to_vec()).collect()
    });
    crate::rendezvous::fuzzing::targets()
        .into_iter()
        .chain(crate::message::fuzzing::targets())
        .chain(crate::tls::fuzzing::targets())
        .chain(crate::interface::fuzzing::targets())
        .chain([own])
        .collect()
}

/// The name of a congestion control.
pub fn congestion_control(bytes: &[u8]) -> Verdict {
    let Ok(text) = str::from_utf8(bytes) else { return Verdict::Rejected };
    let Ok(congestion) = text.parse::<Congestion>() else { return Verdict::Rejected };
    assert_eq!(congestion.to_string().parse::<Congestion>().ok(), Some(congestion));
    Verdict::Accepted
}
