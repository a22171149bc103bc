//! Watches the machine while something is measured: what disturbs a run makes its figures doubtful.
//!
//! Whatever the system does not tell is left out: no flag is better than one for nothing.

mod clock;
mod load;
mod sys;

use std::path::Path;
use std::time::Duration;

use crate::flag::{Flag, FlagKind};
use clock::Clock;
use load::Load;

/// A run under watch.
pub struct Watch {
    load: Option<Load>,
    clock: Clock,
    beside: Vec<u32>,
}

impl Watch {
    /// Looks at the machine, which takes about a tenth of a second, just before a run. The processes `beside` belong to the
    /// measurement and live on after it, such as those that play links.
    pub fn start(beside: Vec<u32>) -> Watch {
        let clock = Clock::read(Path::new("/"));
        Watch { clock, load: Load::read(Path::new("/"), &beside), beside }
    }

    /// What disturbed the run. All its other processes must have ended and been waited for: until then their processor time
    /// is taken for that of strangers.
    pub fn finish(self) -> Vec<Flag> {
        let load = self
            .load
            .zip(Load::read(Path::new("/"), &self.beside))
            .map(|(before, after)| before.strangers_until(&after));
        let clock = self.clock.moved_until(&self.clock.again(Path::new("/")));
        let flag = |kind: FlagKind, found: Vec<String>| found.into_iter().map(move |what| Flag { kind, what });
        flag(FlagKind::MachineBusy, load.unwrap_or_default()).chain(flag(FlagKind::ClockMoved, clock)).collect()
    }
}

/// How long [`busy`] looks.
const LOOK: Duration = Duration::from_millis(400);

/// What others do with the processor at this moment, if it is enough to disturb; takes half a second.
pub fn busy() -> Option<String> {
    let watch = Watch::start(Vec::new());
    std::thread::sleep(LOOK);
    watch.finish().into_iter().find(|flag| flag.kind == FlagKind::MachineBusy).map(|flag| flag.what)
}

/// Bytes of memory that are free for programs, where the kernel says so.
pub fn available_memory() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(1024.0 * line.trim().strip_suffix(" kB")?.parse::<f64>().ok()?)
}

/// The doubt about a run of more computing threads than cores.
pub fn shared_cores(ranks: usize, threads: usize) -> Option<Flag> {
    shared_among(ranks, threads, std::thread::available_parallelism().ok()?.get())
}

/// As [`shared_cores`], of a machine with so many cores.
pub fn shared_among(ranks: usize, threads: usize, cores: usize) -> Option<Flag> {
    let network = if ranks > 1 { "; ranks wait for the processor, not only for the network" } else { "" };
    let what = format!("{ranks} rank(s) of {threads} computing thread(s) share {cores} cores{network}");
    (ranks * threads > cores).then_some(Flag { kind: FlagKind::SharedCores, what })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn ranks_without_a_core_each_share() {
        assert_eq!(shared_among(2, 1, 2), None);
        let flag = shared_among(3, 1, 2).unwrap();
        assert_eq!(flag.kind, FlagKind::SharedCores);
        assert!(flag.what.starts_with("3 rank(s) of 1 computing thread(s) share 2 cores;"), "{}", flag.what);
    }

    #[test]
    fn a_watch_ends_and_does_not_take_own_work_for_that_of_strangers() {
        let watch = Watch::start(Vec::new());
        let end = Instant::now() + Duration::from_millis(300);
        while Instant::now() < end {}
        let flags = watch.finish();
        // Other processes of this machine may well have been busy; what is checked is that this loop alone is not among
        // them.
        assert!(flags.iter().all(|flag| !flag.what.is_empty()), "{flags:?}");
        println!("{flags:?}");
    }
}
