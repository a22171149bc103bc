//! Profiles of links as simulations take them.

use predict::network::{Link, Pipe, Pipes};
use rig::link::{PipeSpec, Profile};

/// The link of a profile that was named `name`.
pub(super) fn link(name: &str, profile: &Profile) -> Link {
    let pipes = |of: &rig::link::Pipes| Pipes {
        up: Pipe { holds_sender: profile.holds_senders(), ..pipe(profile, &of.up) },
        down: pipe(profile, &of.down),
    };
    Link {
        name: name.into(),
        mtu: profile.mtu,
        usual: pipes(&profile.usual),
        unusual: profile.unusual.iter().map(|(end, each)| (*end, pipes(each))).collect(),
    }
}

/// The links of a list that was cut at commas, of which those of a rate with an MTU are part of a name: `lan-1g,300mbit,mtu=1500` are two.
pub(super) fn whole(pieces: &[String]) -> Vec<String> {
    let mut links: Vec<String> = Vec::new();
    for piece in pieces {
        let goes_on = ["mtu=", "congestion="].iter().any(|begin| piece.starts_with(begin));
        match links.last_mut().filter(|_| goes_on) {
            Some(link) => *link = format!("{link},{piece}"),
            None => links.push(piece.clone()),
        }
    }
    links
}

fn pipe(profile: &Profile, spec: &PipeSpec) -> Pipe {
    Pipe {
        bits_per_s: spec.rate_bits_per_s.map(|bits| bits as f64),
        delay_s: spec.delay.as_secs_f64(),
        loss: spec.loss.average(),
        queue_bytes: spec.queue_bytes.map(|bytes| bytes as f64),
        burst_bytes: profile.burst_bytes(spec) as f64,
        holds_sender: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_the_same_link() {
        let of = |name: &str| link(name, &Profile::find(name).unwrap());
        let wan = of("wan-lossy");
        assert!((wan.delay_s(0, 1) - 0.025).abs() < 1e-9 && (wan.loss(0, 1) - 0.005).abs() < 1e-9);
        assert_eq!(wan.least_rate(), Some(1e8));
        // The emulator plays a link further on, which takes all that is sent to it; a virtual cable is the sender's own, and has a token bucket.
        let bucket = |pipe: Pipe| (pipe.burst_bytes as u64, pipe.holds_sender);
        assert_eq!((bucket(wan.usual.up), bucket(wan.usual.down)), ((0, false), (0, false)));
        let slow = of("slow-rank");
        assert_eq!((slow.pipes(1).up.bits_per_s, slow.pipes(0).up.bits_per_s), (Some(1e8), Some(1e9)));
        assert_eq!((bucket(slow.pipes(0).up), bucket(slow.pipes(0).down)), ((250_000, true), (250_000, false)));
        assert_eq!((of("loopback").least_rate(), bucket(of("loopback").usual.up).0), (None, 0));
        assert_eq!(of("300mbit,mtu=1500").name, "300mbit,mtu=1500");
    }

    #[test]
    fn a_rate_with_an_mtu_is_one_link_of_a_list() {
        let of = |list: &str| whole(&list.split(',').map(String::from).collect::<Vec<_>>());
        assert_eq!(of("loopback,lan-1g"), ["loopback", "lan-1g"]);
        assert_eq!(
            of("lan-1g,300mbit,mtu=1500,none,mtu=9000,congestion=bbr,wan"),
            ["lan-1g", "300mbit,mtu=1500", "none,mtu=9000,congestion=bbr", "wan"]
        );
        assert!(whole(&of("300mbit,mtu=1500")).iter().all(|link| Profile::find(link).is_ok()));
    }
}
