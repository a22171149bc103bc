//! Network namespaces that a link joins, and what is known of the link.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::emulator::{self, Emulator, EmulatorSpec, EndSpec, PipeCounters};
use super::hub::{self, Hub};
use super::pipe::Pipe;
use super::privileges::may_make_namespaces;
use super::profile::{Carrier, Pipes, Profile};
use super::rate::Rate;
use super::tools::{self, Namespace, remove_leftovers};
use super::units::show_bytes;
use super::{INTERFACE, LinkOptions, MAX_ENDS, PREFIX, SUBNET, address};
use crate::rank::this_program;

/// Where jobs run: on loopback, or in namespaces, one for each end of a link. All of it is gone when this is dropped.
#[derive(Debug)]
pub struct TestNetwork {
    profile: Profile,
    congestion: Option<String>,
    /// Whether this kernel could emulate by itself; known where our emulator does it.
    has_netem: Option<bool>,
    // In this order they are dropped: first what uses the namespaces.
    carried: NetworkKind,
    ends: Vec<Namespace>,
}

#[derive(Debug)]
enum NetworkKind {
    Loopback,
    Veth(Hub),
    Emulated(Mutex<Emulator>),
}

impl TestNetwork {
    /// Takes away what dead runs have left, and makes a network of `ends` ends, for jobs of as many ranks or of a multiple. `congestion` is the
    /// TCP congestion control of everybody, by its kernel name; `None` for the kernel's default. On loopback there are no ends; with a
    /// congestion control it is that of a namespace, where there may be one, and else transports set what they can.
    ///
    /// # Errors
    /// What is missing, for the user.
    pub fn new(profile: &Profile, ends: usize, congestion: Option<&str>) -> Result<Self, String> {
        if profile.carrier == Carrier::None {
            let congestion = congestion.filter(|_| may_make_namespaces().is_ok());
            return congestion.map_or_else(|| Ok(TestNetwork::loopback()), TestNetwork::loopback_with);
        }
        if !(2..=MAX_ENDS).contains(&ends) {
            return Err(format!("the link {}: it can have 2 to {MAX_ENDS} ends, not {ends}", profile.name));
        }
        if let Some(last) = profile.unusual.keys().max().filter(|last| **last >= ends) {
            return Err(format!(
                "the link {}: its profile describes the end of rank {last}, but there are only {ends} ends, 0 to {}; use more ranks",
                profile.name,
                ends - 1
            ));
        }
        may_make_namespaces()?;
        for name in remove_leftovers() {
            eprintln!("removed the network namespace {name}, which a killed run had left behind");
        }
        let ends = (0..ends).map(|_| Namespace::new()).collect::<Result<Vec<_>, _>>()?;
        for end in &ends {
            end.ip(&["link", "set", "lo", "up"])?;
        }
        let (mut has_netem, of_profile) = (None, |why: String| format!("the link {}: {why}", profile.name));
        let carried = match profile.carrier {
            Carrier::None => NetworkKind::Loopback,
            Carrier::Veth => NetworkKind::Veth(Hub::new(profile, &ends).map_err(of_profile)?),
            Carrier::Emulated => {
                has_netem = ends.first().map(kernel_has_netem);
                let emulator = Emulator::start(&this_program()?, &spec(profile, &ends)).map_err(of_profile)?;
                NetworkKind::Emulated(Mutex::new(emulator))
            }
        };
        let network = TestNetwork {
            profile: profile.clone(),
            congestion: congestion.map(String::from),
            has_netem,
            carried,
            ends,
        };
        network.set_congestion()?;
        Ok(network)
    }

    /// Loopback, in a namespace of its own: a route gives everything that goes over it the same congestion control, also what only a
    /// library reaches.
    fn loopback_with(congestion: &str) -> Result<Self, String> {
        let namespace = Namespace::new()?;
        namespace.ip(&["link", "set", "lo", "up"])?;
        let route = ["route", "replace", "local", "127.0.0.1", "dev", "lo", "table", "local", "congctl", congestion];
        namespace.ip(&route).map_err(|why| format!("congestion control {congestion}: {why}"))?;
        Ok(TestNetwork { congestion: Some(congestion.into()), ends: vec![namespace], ..TestNetwork::loopback() })
    }

    /// Loopback.
    pub fn loopback() -> Self {
        TestNetwork {
            profile: Profile::loopback(),
            congestion: None,
            has_netem: None,
            carried: NetworkKind::Loopback,
            ends: Vec::new(),
        }
    }

    /// Two ends of the link that a command line asks for, or loopback if it asks for none.
    ///
    /// # Errors
    /// Those of [`new`](TestNetwork::new).
    pub fn of(link: Option<&LinkOptions>) -> Result<Self, String> {
        let Some(options) = link else { return Ok(TestNetwork::loopback()) };
        options.check()?;
        TestNetwork::new(&options.profile(), 2, options.congestion.as_deref())
    }

    /// Why there can be nothing but loopback here, if so.
    pub fn unavailable() -> Option<String> {
        let programs = || ["ip", "tc"].into_iter().find_map(|program| tools::run(program, &["-V"]).err());
        may_make_namespaces().err().or_else(programs)
    }

    /// Why there can be no link of this kind here, if so. Loopback can always be.
    pub fn unavailable_for(profile: &Profile) -> Option<String> {
        match profile.carrier {
            Carrier::None => None,
            Carrier::Veth => TestNetwork::unavailable(),
            Carrier::Emulated => TestNetwork::unavailable().or_else(emulator::unavailable),
        }
    }

    /// A route through which connections take the congestion control.
    fn set_congestion(&self) -> Result<(), String> {
        let Some(congestion) = &self.congestion else { return Ok(()) };
        for (number, end) in self.ends.iter().enumerate() {
            let own = address(number).to_string();
            end.ip(&["route", "replace", SUBNET, "dev", INTERFACE, "src", &own, "congctl", congestion])
                .map_err(|why| format!("congestion control {congestion}: {why}"))?;
        }
        Ok(())
    }

    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The namespaces' names, by end; none on loopback.
    pub(super) fn namespaces(&self) -> impl Iterator<Item = &str> {
        self.ends.iter().map(Namespace::name)
    }

    /// Number of namespaces; 0 on this process's own loopback.
    pub fn ends(&self) -> usize {
        self.ends.len()
    }

    /// Whether jobs can run over it: whether an emulator that plays it lives.
    pub fn is_alive(&self) -> bool {
        match &self.carried {
            NetworkKind::Loopback | NetworkKind::Veth(_) => true,
            NetworkKind::Emulated(emulator) => lock(emulator).is_alive(),
        }
    }

    /// Whether ranks talk over loopback, in whichever namespace.
    pub fn is_loopback(&self) -> bool {
        matches!(self.carried, NetworkKind::Loopback)
    }

    /// The process that plays the link, where one does.
    pub fn process(&self) -> Option<u32> {
        match &self.carried {
            NetworkKind::Loopback | NetworkKind::Veth(_) => None,
            NetworkKind::Emulated(emulator) => Some(lock(emulator).process()),
        }
    }

    /// One line about the link.
    pub fn describe(&self) -> String {
        let how = match &self.carried {
            NetworkKind::Loopback => {
                let in_namespace = |name: &String| format!(", in a namespace; TCP congestion control {name}");
                return format!("loopback{}", self.congestion.as_ref().map_or(String::new(), in_namespace));
            }
            NetworkKind::Veth(_) => {
                let Pipes { up, down } = &self.profile.usual;
                let limited = [up, down].into_iter().find(|pipe| pipe.rate_bits_per_s.is_some());
                let filter = limited.map_or(String::new(), |pipe| {
                    format!(" with tbf, burst {}", show_bytes(hub::burst(pipe, self.profile.mtu)))
                });
                format!("veth{filter}")
            }
            NetworkKind::Emulated(_) => {
                let netem = if self.has_netem == Some(true) { "is available, but not used" } else { "is not there" };
                format!("emulated through TUN; the kernel's netem {netem}")
            }
        };
        let congestion = self.congestion.as_ref().map_or("the kernel's default", |name| name);
        let Profile { name, .. } = &self.profile;
        format!(
            "{name}: {} network namespaces, {how}; {}; TCP congestion control {congestion}",
            self.ends.len(),
            self.profile.describe()
        )
    }

    /// How long `bytes` need at the rate of the slowest pipe, in milliseconds; `None` where nothing has a rate.
    pub fn ms_of(&self, bytes: u64) -> Option<f64> {
        let least = (0..self.ends.len()).filter_map(|end| self.profile.pipes(end).least_rate()).min()?;
        Some(Rate::of_bits(least).ms_of(bytes))
    }

    /// What passed each pipe since [`reset_counters`](TestNetwork::reset_counters), by the emulator or, for pipes with a rate, the kernel.
    ///
    /// # Errors
    /// Why it is not known.
    pub fn pipes(&self) -> Result<Vec<Pipe>, String> {
        match &self.carried {
            NetworkKind::Loopback => Ok(Vec::new()),
            NetworkKind::Veth(hub) => hub.pipes(&self.ends),
            NetworkKind::Emulated(emulator) => {
                let ends = lock(emulator).counters()?.ends.into_iter().enumerate();
                let both = ends.flat_map(|(end, both)| [(end, "up", both.up), (end, "down", both.down)]);
                let pipe = |(end, direction, counted): (usize, &str, PipeCounters)| Pipe {
                    end,
                    direction: direction.into(),
                    packets: counted.packets,
                    bytes: counted.bytes,
                    lost: counted.lost,
                    overflowed: counted.overflowed,
                    reordered: counted.reordered,
                    duplicated: counted.duplicated,
                    late_p50_us: counted.late_p50_us,
                    late_p99_us: counted.late_p99_us,
                };
                Ok(both.map(pipe).collect())
            }
        }
    }

    /// Has all counters begin anew.
    ///
    /// # Errors
    /// Why they do not.
    pub fn reset_counters(&self) -> Result<(), String> {
        match &self.carried {
            NetworkKind::Loopback => Ok(()),
            NetworkKind::Veth(hub) => hub.reset(&self.ends),
            NetworkKind::Emulated(emulator) => lock(emulator).reset(),
        }
    }

    /// Why the emulator, and not the link that it plays, may have held packets back since the counters began; `None` if it did not.
    ///
    /// # Errors
    /// Why it is not known.
    pub fn bottleneck(&self) -> Result<Option<String>, String> {
        match &self.carried {
            NetworkKind::Loopback | NetworkKind::Veth(_) => Ok(None),
            NetworkKind::Emulated(emulator) => Ok(lock(emulator).counters()?.bottleneck()),
        }
    }
}

fn lock(emulator: &Mutex<Emulator>) -> MutexGuard<'_, Emulator> {
    emulator.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spec(profile: &Profile, ends: &[Namespace]) -> EmulatorSpec {
    let end = |(number, namespace): (usize, &Namespace)| {
        let Pipes { up, down } = profile.pipes(number).clone();
        EndSpec {
            namespace: namespace.name().into(),
            device: INTERFACE.into(),
            address: address(number),
            prefix: PREFIX,
            up,
            down,
        }
    };
    EmulatorSpec { seed: profile.seed, mtu: profile.mtu, ends: ends.iter().enumerate().map(end).collect() }
}

/// Tries it out.
fn kernel_has_netem(namespace: &Namespace) -> bool {
    let on_loopback = |what: &[&str]| namespace.tc(&[&["qdisc"][..], what].concat());
    let has = on_loopback(&["add", "dev", "lo", "root", "netem", "delay", "1ms"]).is_ok();
    if has {
        let _ = on_loopback(&["delete", "dev", "lo", "root"]);
    }
    has
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A network, or why not, which is said.
    fn network(profile: &Profile, ends: usize) -> Option<TestNetwork> {
        if let Some(why) = TestNetwork::unavailable() {
            eprintln!("skipped: {why}");
            return None;
        }
        match TestNetwork::new(profile, ends, None) {
            Ok(network) => Some(network),
            // Named, and only where it is the reason.
            Err(why) => {
                assert!(why.contains("tbf") || why.contains("/dev/net/tun"), "{why}");
                eprintln!("skipped: {why}");
                None
            }
        }
    }

    fn all_exist(names: &[String]) -> bool {
        names.iter().all(|name| Path::new(tools::NAMESPACES).join(name).exists())
    }

    fn names(network: &TestNetwork) -> Vec<String> {
        let mut names: Vec<String> = network.namespaces().map(String::from).collect();
        if let NetworkKind::Veth(hub) = &network.carried {
            names.push(hub.name().into());
        }
        names
    }

    #[test]
    fn a_network_is_gone_when_it_is_dropped() {
        let Some(network) = network(&Profile::find("lan-1g").unwrap(), 3) else { return };
        let first = names(&network);
        assert!(first.len() == 4 && all_exist(&first));
        assert!(network.describe().contains("1gbit") && network.describe().contains("3 network namespaces"));
        let other = TestNetwork::of(Some(&LinkOptions { rate: None, mtu: 9000, congestion: None })).unwrap();
        assert!(names(&other).iter().all(|name| !first.contains(name)), "they share no namespace");
        assert_eq!((network.ms_of(1_250_000), other.ms_of(1_250_000)), (Some(10.0), None));
        drop(network);
        assert!(first.iter().all(|name| !all_exist(std::slice::from_ref(name))));
    }

    #[test]
    fn a_congestion_control_that_is_not_there_leaves_no_namespace() {
        if let Some(why) = TestNetwork::unavailable() {
            eprintln!("skipped: {why}");
            return;
        }
        let why = TestNetwork::new(&Profile::find("lan-1g").unwrap(), 2, Some("pigeon")).unwrap_err();
        // What `ip` does with a name that the kernel does not know is its own affair; it must not pass in silence.
        assert!(why.contains("pigeon") || why.contains("tbf"), "{why}");
    }

    #[test]
    fn loopback_takes_nothing() {
        let network = TestNetwork::new(&Profile::find("loopback").unwrap(), 4, None).unwrap();
        assert_eq!((network.ends(), network.interface(), network.describe().as_str()), (0, "lo", "loopback"));
        assert!(network.addresses().is_none() && network.pipes().unwrap().is_empty() && network.ms_of(1).is_none());
    }

    #[test]
    fn loopback_with_a_congestion_control_is_in_a_namespace_where_there_may_be_one() {
        let network = TestNetwork::new(&Profile::find("loopback").unwrap(), 4, Some("reno")).unwrap();
        let expected = usize::from(TestNetwork::unavailable().is_none());
        assert_eq!((network.ends(), network.interface()), (expected, "lo"));
        assert_eq!(network.describe().contains("reno"), expected == 1, "{}", network.describe());
        assert!(network.addresses().is_none() && network.pipes().unwrap().is_empty() && network.ms_of(1).is_none());
    }

    #[test]
    fn an_end_that_is_described_must_be_there() {
        let mut profile = Profile::find("slow-rank").unwrap();
        profile.unusual.insert(2, Pipes::default());
        let why = TestNetwork::new(&profile, 2, None).unwrap_err();
        assert!(why.contains("slow-rank") && why.contains("rank 2"), "{why}");
    }

    #[test]
    fn a_link_has_two_ends_at_least() {
        let why = TestNetwork::new(&Profile::find("wan").unwrap(), 1, None).unwrap_err();
        assert!(why.contains("wan") && why.contains("not 1"), "{why}");
    }
}
