//! Parameters that come from other ranks after an update, bucket by bucket.

use std::collections::VecDeque;

use super::LocalStep;
use super::channels::finish_until;
use super::layout::Bucket;
use crate::error::TrainError;
use crate::flat::Weights;

/// Buckets that are on their way at a time where they come without a pass: one that comes, and the one that is put into the model.
const AT_ONCE: usize = 2;

/// The buckets of parameters that the model has not got since the last update. They come in the order in which a forward pass needs them, from
/// the last bucket of gradients to the first: the next one while the pass uses those before, or all at once. `T` is what is under way of one.
pub(super) struct Arrivals<T> {
    /// Buckets that nobody has asked for: the first so many.
    unasked: usize,
    /// The one that is under way.
    coming: Option<(usize, T)>,
    /// Updates of which something has come since [`take_rounds`](Arrivals::take_rounds).
    rounds: usize,
}

impl<T> Arrivals<T> {
    /// Nothing is to come.
    pub(super) fn none() -> Self {
        Arrivals { unasked: 0, coming: None, rounds: 0 }
    }

    /// All of `buckets` buckets are to come, after an update.
    pub(super) fn expect(&mut self, buckets: usize) {
        self.unasked = buckets;
    }

    /// Whether the next bucket to come is that with `segment`; the others that are to come have later segments.
    pub(super) fn has_next(&self, segment: usize, plan: &[Bucket]) -> bool {
        let next = self.coming.as_ref().map(|(index, _)| *index).or(self.unasked.checked_sub(1));
        next.is_some_and(|index| plan[index].segments.contains(&segment))
    }

    /// Has `start` ask for the next bucket, unless one is under way or none is left.
    pub(super) fn ask(
        &mut self,
        buckets: usize,
        start: impl FnOnce(usize) -> comm_core::Result<T>,
    ) -> comm_core::Result<()> {
        if self.coming.is_none() && self.unasked > 0 {
            self.rounds += usize::from(self.unasked == buckets);
            self.unasked -= 1;
            self.coming = Some((self.unasked, start(self.unasked)?));
        }
        Ok(())
    }

    /// Takes the one that is under way.
    pub(super) fn take(&mut self) -> Option<(usize, T)> {
        self.coming.take()
    }

    /// Takes the one that is under way, and what `finish` makes of it, each with its segment.
    ///
    /// # Errors
    /// Those of `finish`.
    pub(super) fn finish_next(
        &mut self,
        plan: &[Bucket],
        finish: impl FnOnce(&Bucket, T) -> comm_core::Result<Vec<Weights>>,
    ) -> comm_core::Result<Vec<(usize, Weights)>> {
        let Some((index, pending)) = self.take() else { return Ok(Vec::new()) };
        let bucket = &plan[index];
        Ok(bucket.segments.iter().copied().zip(finish(bucket, pending)?).collect())
    }

    /// Brings all that is to come into the model of `train` now.
    ///
    /// # Errors
    /// Those of `start`, of `finish`, and of the model.
    pub(super) fn bring(
        &mut self,
        plan: &[Bucket],
        train: &mut dyn LocalStep,
        mut start: impl FnMut(usize, &dyn LocalStep) -> comm_core::Result<T>,
        mut finish: impl FnMut(usize, T) -> comm_core::Result<Vec<Weights>>,
    ) -> Result<(), TrainError> {
        let mut put = |train: &mut dyn LocalStep, (index, pending): (usize, T)| {
            let parts = finish(index, pending)?;
            plan[index].segments.iter().zip(parts).try_for_each(|(segment, part)| train.put(*segment, part))
        };
        let mut under_way = VecDeque::new();
        loop {
            self.ask(plan.len(), |index| start(index, &*train))?;
            let Some(next) = self.take() else { break };
            under_way.push_back(next);
            finish_until(AT_ONCE, &mut under_way, |next| put(train, next))?;
        }
        finish_until(1, &mut under_way, |next| put(train, next))
    }

    /// Of how many updates anything has come since this was asked last.
    pub(super) fn take_rounds(&mut self) -> usize {
        std::mem::take(&mut self.rounds)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Layout;
    use super::super::layout::buckets;
    use super::*;

    #[test]
    fn buckets_come_in_the_order_of_the_forward_pass_one_ahead() {
        let plan = buckets(&Layout::new(&[4, 2, 2, 1]), (0..4).rev(), 12, 16);
        let segments: Vec<&[usize]> = plan.iter().map(|bucket| &bucket.segments[..]).collect();
        assert_eq!(segments, [&[3, 2][..], &[1, 0]]);
        let mut arrivals = Arrivals::none();
        assert!(!arrivals.has_next(0, &plan));
        arrivals.expect(plan.len());
        let (mut asked, mut came) = (Vec::new(), Vec::new());
        let mut start = |index| {
            asked.push(index);
            Ok(())
        };
        for segment in 0..4 {
            if !arrivals.has_next(segment, &plan) {
                continue;
            }
            arrivals.ask(plan.len(), &mut start).unwrap();
            came.push((segment, arrivals.take().unwrap().0));
            arrivals.ask(plan.len(), &mut start).unwrap();
        }
        assert_eq!((asked, came), (vec![1, 0], vec![(0, 1), (2, 0)]));
        assert!(arrivals.take().is_none());
        assert_eq!((arrivals.take_rounds(), arrivals.take_rounds()), (1, 0));
    }
}
