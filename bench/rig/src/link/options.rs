//! A link of two equal ends, as command lines ask for it.

use std::collections::BTreeMap;

use super::MTU;
use super::emulator::PipeSpec;
use super::profile::{Carrier, Pipes, Profile, usual_queue};
use super::rate::Rate;

/// What a link is like.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkOptions {
    /// `None` for as fast as the kernel copies.
    pub rate: Option<Rate>,
    /// Largest packet in bytes, with the IP header.
    pub mtu: u32,
    /// TCP congestion control of everything that goes over the link, by its kernel name; `None` for the kernel's default.
    pub congestion: Option<String>,
}

impl LinkOptions {
    /// Whether there can be such a link.
    ///
    /// # Errors
    /// What cannot be, for the user.
    pub fn check(&self) -> Result<(), String> {
        if !MTU.contains(&self.mtu) {
            return Err(format!("--mtu {} must lie between {} and {}", self.mtu, MTU.start(), MTU.end()));
        }
        if self.congestion.as_ref().is_some_and(|name| name.is_empty() || name.len() > 15) {
            return Err("--congestion: a name has 1 to 15 letters".into());
        }
        Ok(())
    }

    /// Ends that are held to the rate where they send.
    pub(super) fn profile(&self) -> Profile {
        let up = PipeSpec {
            rate_bits_per_s: self.rate.map(Rate::bits_per_second),
            queue_bytes: self.rate.map(|rate| usual_queue(rate, self.mtu)),
            ..PipeSpec::default()
        };
        Profile {
            name: "link".into(),
            about: String::new(),
            carrier: Carrier::Veth,
            mtu: self.mtu,
            seed: 0,
            usual: Pipes { up, down: PipeSpec::default() },
            unusual: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> LinkOptions {
        LinkOptions { rate: Some("1gbit".parse().unwrap()), mtu: 1500, congestion: None }
    }

    #[test]
    fn impossible_links_are_refused() {
        let refused = |change: &dyn Fn(&mut LinkOptions)| {
            let mut options = options();
            change(&mut options);
            options.check().unwrap_err()
        };
        assert!(refused(&|o| o.mtu = 500).contains("--mtu 500"));
        assert!(refused(&|o| o.mtu = 70_000).contains("--mtu 70000"));
        assert!(refused(&|o| o.congestion = Some(String::new())).contains("--congestion"));
    }

    #[test]
    fn a_link_has_one_rate_each_way() {
        let profile = options().profile();
        assert_eq!(
            (profile.usual.up.rate_bits_per_s, profile.usual.up.queue_bytes),
            (Some(1_000_000_000), Some(6_250_000))
        );
        assert_eq!(profile.usual.down, PipeSpec::default());
        let free = LinkOptions { rate: None, ..options() }.profile();
        assert_eq!(free.usual, Pipes::default());
    }
}
