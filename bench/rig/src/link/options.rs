//! A link of two equal ends, as command lines ask for it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::MTU;
use super::emulator::PipeSpec;
use super::profile::{Carrier, Pipes, Profile, usual_queue};
use super::rate::{Rate, RateLimit};

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
            return Err(format!("--mtu {} must be from {} to {}", self.mtu, MTU.start(), MTU.end()));
        }
        if self.congestion.as_ref().is_some_and(|name| name.is_empty() || name.len() > 15) {
            return Err("--congestion: the name must have 1 to 15 letters".into());
        }
        Ok(())
    }

    /// Whether a link's name is that of such a link: see [`Display`](fmt::Display).
    pub fn is_one(name: &str) -> bool {
        name.contains(MTU_IS)
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

const MTU_IS: &str = ",mtu=";
const CONGESTION_IS: &str = ",congestion=";

/// The link's name, by which [`Profile::find`] finds it: `1gbit,mtu=1500`, or `none,mtu=9000,congestion=bbr`.
impl fmt::Display for LinkOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rate {
            Some(rate) => write!(f, "{rate}{MTU_IS}{}", self.mtu)?,
            None => write!(f, "none{MTU_IS}{}", self.mtu)?,
        }
        self.congestion.as_ref().map_or(Ok(()), |name| write!(f, "{CONGESTION_IS}{name}"))
    }
}

impl FromStr for LinkOptions {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let (link, congestion) = match name.split_once(CONGESTION_IS) {
            Some((link, congestion)) => (link, Some(congestion.to_string())),
            None => (name, None),
        };
        let (rate, mtu) = link
            .split_once(MTU_IS)
            .ok_or_else(|| format!("`{name}` is not a rate with an MTU, such as 1gbit,mtu=1500"))?;
        let RateLimit(rate) = rate.parse()?;
        let mtu = mtu.parse().map_err(|_| format!("`{name}`: `{mtu}` is not a size of a packet"))?;
        let options = LinkOptions { rate, mtu, congestion };
        options.check()?;
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> LinkOptions {
        LinkOptions { rate: Some("1gbit".parse().unwrap()), mtu: 1500, congestion: None }
    }

    #[test]
    fn a_link_is_found_by_its_name() {
        let bbr = LinkOptions { rate: None, mtu: 9000, congestion: Some("bbr".into()) };
        for (options, name) in [(options(), "1gbit,mtu=1500"), (bbr, "none,mtu=9000,congestion=bbr")] {
            assert_eq!((options.to_string().as_str(), name.parse().as_ref()), (name, Ok(&options)));
            assert_eq!(Profile::find(name).unwrap().usual, options.profile().usual);
        }
        for wrong in ["1gbit", "fast,mtu=1500", "1gbit,mtu=big", "1gbit,mtu=100"] {
            assert!(wrong.parse::<LinkOptions>().is_err(), "{wrong}");
        }
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
