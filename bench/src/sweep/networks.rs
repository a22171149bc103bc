//! The networks of a sweep: each is made when the first cell needs it, and stays until the end.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use rig::link::{LinkOptions, Probe, Profile, TestNetwork};
use rig::outcome::RunError;
use rig::record::{Cell, DEFAULT, LOOPBACK, Status};
use rig::signal::Interrupted;
use rig::training::status;

/// Most networks that exist at a time: each is some namespaces, and maybe a process.
const MOST: usize = 8;

/// What makes a network another one: its profile, its ends, and its congestion control.
type Key = (String, usize, String);

pub(super) struct TestNetworks {
    /// Whether each is measured when it is made.
    probe: bool,
    networks: HashMap<Key, (TestNetwork, Option<Probe>)>,
    /// Those that this machine cannot have, and why.
    unavailable: HashMap<Key, String>,
}

impl TestNetworks {
    pub(super) fn new(probe: bool) -> Self {
        TestNetworks { probe, networks: HashMap::new(), unavailable: HashMap::new() }
    }

    /// The network that a cell goes over, with what was measured of it. One whose emulator has died is made anew. Where there is none, the
    /// status says why: `NotAvailable` where this machine cannot have it, `Failed` where something went wrong this time.
    ///
    /// # Errors
    /// A signal asked to end.
    pub(super) fn of(&mut self, cell: &Cell) -> Result<Result<(&TestNetwork, Option<Probe>), Status>, Interrupted> {
        let key = key(cell);
        if let Some(why) = self.unavailable.get(&key) {
            return Ok(Err(Status::NotAvailable(why.clone())));
        }
        if self.networks.get(&key).is_some_and(|(network, _)| !network.is_alive()) {
            self.networks.remove(&key);
        }
        if self.networks.len() >= MOST && !self.networks.contains_key(&key) {
            // Whose turn is over, as cells of a link follow one another.
            self.networks.clear();
        }
        let (network, probe) = match self.networks.entry(key) {
            Entry::Occupied(old) => old.into_mut(),
            Entry::Vacant(new) => match make(new.key(), self.probe) {
                Ok(made) => new.insert(made),
                Err(RunError::Failed(why)) if is_unavailable(new.key()) => {
                    self.unavailable.insert(new.key().clone(), why.clone());
                    return Ok(Err(Status::NotAvailable(why)));
                }
                Err(error) => return Ok(Err(status(error)?)),
            },
        };
        Ok(Ok((network, *probe)))
    }
}

fn key(cell: &Cell) -> Key {
    let ends = if cell.link == LOOPBACK { 0 } else { cell.ends() };
    (cell.link.clone(), ends, cell.congestion.clone())
}

fn make((link, ends, congestion): &Key, probe: bool) -> Result<(TestNetwork, Option<Probe>), RunError> {
    let own = if LinkOptions::is_one(link) { link.parse::<LinkOptions>()?.congestion } else { None };
    let congestion = own.or_else(|| (congestion != DEFAULT).then(|| congestion.clone()));
    let network = TestNetwork::new(&Profile::find(link)?, *ends, congestion.as_deref())?;
    let probe = if probe { Probe::of(&network)? } else { None };
    Ok((network, probe))
}

/// Whether this machine cannot have it. Loopback with a congestion control of its own is in a namespace, too.
fn is_unavailable((link, ..): &Key) -> bool {
    let profile = Profile::find(link).ok();
    TestNetwork::unavailable().or_else(|| TestNetwork::unavailable_for(&profile?)).is_some()
}

/// Whether a cell's ranks are to live in namespaces.
pub(super) fn needs_namespaces(cell: &Cell) -> bool {
    cell.link != LOOPBACK || cell.congestion != DEFAULT
}
