//! The networks of a sweep: each is made when the first cell needs it, and stays until the end.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use rig::link::{Profile, World};
use rig::record::{Cell, DEFAULT, LOOPBACK, Status};

/// Most networks that exist at a time: each is some namespaces, and maybe a process.
const MOST: usize = 8;

/// What makes a network another one: its profile, its ends, and its congestion control.
type Key = (String, usize, String);

#[derive(Default)]
pub(super) struct Worlds {
    worlds: HashMap<Key, World>,
}

impl Worlds {
    /// The network that a cell goes over. One whose emulator has died is made anew.
    ///
    /// # Errors
    /// Why there is none: `NotAvailable` where this machine cannot have it, `Failed` where something went wrong this time.
    pub(super) fn of(&mut self, cell: &Cell) -> Result<&World, Status> {
        let key = key(cell);
        if self.worlds.get(&key).is_some_and(|world| !world.is_alive()) {
            self.worlds.remove(&key);
        }
        if self.worlds.len() >= MOST && !self.worlds.contains_key(&key) {
            // Whose turn is over, as cells of a link follow one another.
            self.worlds.clear();
        }
        match self.worlds.entry(key) {
            Entry::Occupied(old) => Ok(old.into_mut()),
            Entry::Vacant(new) => {
                let world = make(new.key()).map_err(|why| match World::unavailable() {
                    Some(_) => Status::NotAvailable(why),
                    None => Status::Failed(why),
                })?;
                Ok(new.insert(world))
            }
        }
    }
}

fn key(cell: &Cell) -> Key {
    let ends = if cell.link == LOOPBACK { 0 } else { cell.ranks.div_ceil(cell.ranks_per_end()) };
    (cell.link.clone(), ends, cell.congestion.clone())
}

fn make((link, ends, congestion): &Key) -> Result<World, String> {
    let congestion = (congestion != DEFAULT).then_some(congestion.as_str());
    World::new(&Profile::find(link)?, *ends, congestion)
}

/// Whether a cell's ranks are to live in namespaces.
pub(super) fn needs_namespaces(cell: &Cell) -> bool {
    cell.link != LOOPBACK || cell.congestion != DEFAULT
}
