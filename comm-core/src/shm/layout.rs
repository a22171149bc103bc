//! Where things are in a segment.

use crate::error::{Error, Result};

/// Bytes between things that different cores write: two cache lines, because the hardware fetches lines in pairs.
const APART: usize = 128;

/// Messages begin at multiples of this many bytes, so that a header never wraps around the end of a ring and an element never lies
/// on both sides of it.
pub(super) const ALIGN: usize = 64;

/// Bytes of the proof at the start of a segment.
pub(super) const PROOF_LEN: usize = 32;

/// Smallest and largest ring, in bytes.
pub(super) const RING_BYTES: (usize, usize) = (4 << 10, 1 << 30);

/// Offsets in the segment of one rank, into which all others write. Each of the others has a *slot*, in rank order.
///
/// ```text
/// proof | state of each slot | a futex for each lane, and one for closing | head and tail of each ring | bytes of each ring
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    slots: usize,
    lanes: usize,
    ring_bytes: usize,
}

impl Layout {
    /// # Errors
    /// `InvalidArgument` when there are no ranks or lanes, when `ring_bytes` is no power of two within [`RING_BYTES`], or when all of it
    /// does not fit into an address space.
    pub(super) fn new(ranks: usize, lanes: usize, ring_bytes: usize) -> Result<Self> {
        if ranks == 0 || lanes == 0 || lanes > 1 << 16 {
            return Err(Error::invalid(format!("shared memory for {ranks} ranks with {lanes} lanes")));
        }
        if !ring_bytes.is_power_of_two() || ring_bytes < RING_BYTES.0 || ring_bytes > RING_BYTES.1 {
            return Err(Error::invalid(format!(
                "a ring of {ring_bytes} B; choose a power of two from {} to {}",
                RING_BYTES.0, RING_BYTES.1
            )));
        }
        let layout = Layout { slots: ranks - 1, lanes, ring_bytes };
        let rings = layout.slots.checked_mul(lanes).and_then(|rings| rings.checked_mul(ring_bytes + 2 * APART));
        // The rest is far smaller than the rings, and cannot overflow once they do not.
        match rings {
            Some(bytes) if bytes <= isize::MAX as usize / 2 => Ok(layout),
            _ => Err(Error::invalid(format!(
                "{ranks} ranks with {lanes} lanes and rings of {ring_bytes} B need more memory than there can be"
            ))),
        }
    }

    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    pub(super) fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// The slot of rank `peer` in the segment of rank `owner`; they differ.
    pub(super) fn slot(owner: usize, peer: usize) -> usize {
        if peer < owner { peer } else { peer - 1 }
    }

    /// All bytes of the segment.
    pub(super) fn total(&self) -> usize {
        self.data_start() + self.slots * self.lanes * self.ring_bytes
    }

    pub(super) fn state(&self, slot: usize) -> usize {
        APART * (1 + slot)
    }

    /// The futex of a lane; that of closing is number [`lanes`](Layout::lanes).
    pub(super) fn futex(&self, number: usize) -> usize {
        APART * (1 + self.slots + number)
    }

    /// What the producer of a ring writes.
    pub(super) fn head(&self, slot: usize, lane: usize) -> usize {
        APART * (2 + self.slots + self.lanes + 2 * self.ring(slot, lane))
    }

    /// What its consumer writes.
    pub(super) fn tail(&self, slot: usize, lane: usize) -> usize {
        self.head(slot, lane) + APART
    }

    pub(super) fn data(&self, slot: usize, lane: usize) -> usize {
        self.data_start() + self.ring(slot, lane) * self.ring_bytes
    }

    fn ring(&self, slot: usize, lane: usize) -> usize {
        slot * self.lanes + lane
    }

    fn data_start(&self) -> usize {
        (APART * (2 + self.slots + self.lanes + 2 * self.slots * self.lanes)).next_multiple_of(RING_BYTES.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for ranks in 1..6 {
            for lanes in 1..4 {
                let layout = Layout::new(ranks, lanes, 4096).unwrap();
                let mut places = vec![(0, PROOF_LEN)];
                places.extend((0..=lanes).map(|futex| (layout.futex(futex), 4)));
                for slot in 0..ranks - 1 {
                    places.push((layout.state(slot), 4));
                    for lane in 0..lanes {
                        places.push((layout.head(slot, lane), 8));
                        places.push((layout.tail(slot, lane), 8));
                        places.push((layout.data(slot, lane), 4096));
                    }
                }
                places.sort_unstable();
                for pair in places.windows(2) {
                    assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
                    assert!(pair[1].0 - pair[0].0 >= APART, "{pair:?}");
                }
                let (start, len) = places[places.len() - 1];
                assert!(start + len <= layout.total());
            }
        }
    }

    #[test]
    fn every_other_rank_has_its_slot() {
        let slots: Vec<usize> = [0, 1, 3, 4].iter().map(|peer| Layout::slot(2, *peer)).collect();
        assert_eq!(slots, [0, 1, 2, 3]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (ranks, lanes, ring_bytes) in [
            (0, 1, 4096),
            (2, 0, 4096),
            (2, 1, 0),
            (2, 1, 5000),
            (2, 1, 2048),
            (2, 1, 2 << 30),
            (1 << 30, 1 << 16, 1 << 30),
        ] {
            assert!(Layout::new(ranks, lanes, ring_bytes).is_err(), "{ranks} {lanes} {ring_bytes}");
        }
    }
}
