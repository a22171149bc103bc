//! What is to happen when.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

/// A packet reaches the end of a pipe. Ordered by time, then by when it was put down.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Event {
    pub(super) at: u64,
    pub(super) number: u64,
    /// The end that it goes to.
    pub(super) to: usize,
    pub(super) packet: Rc<[u8]>,
}

/// Events, the next one on top.
#[derive(Default)]
pub(super) struct Agenda(BinaryHeap<Reverse<Event>>);

impl Agenda {
    pub(super) fn put(&mut self, event: Event) {
        self.0.push(Reverse(event));
    }

    /// When the next one is due.
    pub(super) fn next(&self) -> Option<u64> {
        self.0.peek().map(|Reverse(event)| event.at)
    }

    /// The next one, if it is due by `at`.
    pub(super) fn take(&mut self, at: u64) -> Option<Event> {
        if self.next()? > at {
            return None;
        }
        self.0.pop().map(|Reverse(event)| event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_in_order() {
        let mut agenda = Agenda::default();
        for (at, number) in [(5, 2), (5, 1), (4, 3), (7, 0)] {
            agenda.put(Event { at, number, to: 0, packet: Rc::from(&[0_u8; 4][..]) });
        }
        assert!(agenda.take(3).is_none());
        let order: Vec<_> = std::iter::from_fn(|| agenda.take(5).map(|event| event.number)).collect();
        assert_eq!((order, agenda.next()), (vec![3, 1, 2], Some(7)));
    }
}
