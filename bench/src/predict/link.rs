//! Profiles of links as simulations take them.

use predict::network::{Link, Pipe, Pipes};
use rig::link::{PipeSpec, Profile};

/// The link of a profile.
pub(super) fn link(profile: &Profile) -> Link {
    let pipes = |up: &PipeSpec, down: &PipeSpec| Pipes { up: pipe(up), down: pipe(down) };
    Link {
        name: profile.name.clone(),
        mtu: profile.mtu,
        usual: pipes(&profile.usual.up, &profile.usual.down),
        unusual: profile.unusual.iter().map(|(end, each)| (*end, pipes(&each.up, &each.down))).collect(),
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

fn pipe(spec: &PipeSpec) -> Pipe {
    Pipe {
        bits_per_s: spec.rate_bits_per_s.map(|bits| bits as f64),
        delay_s: spec.delay.as_secs_f64(),
        loss: spec.loss.average(),
        queue_bytes: spec.queue_bytes.map(|bytes| bytes as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_the_same_link() {
        let wan = link(&Profile::find("wan-lossy").unwrap());
        assert!((wan.delay_s(0, 1) - 0.025).abs() < 1e-9 && (wan.loss(0, 1) - 0.005).abs() < 1e-9);
        assert_eq!(wan.least_rate(), Some(1e8));
        let slow = link(&Profile::find("slow-rank").unwrap());
        assert_eq!((slow.pipes(1).up.bits_per_s, slow.pipes(0).up.bits_per_s), (Some(1e8), Some(1e9)));
        assert_eq!(link(&Profile::find("loopback").unwrap()).least_rate(), None);
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
