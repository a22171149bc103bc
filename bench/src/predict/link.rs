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
}
