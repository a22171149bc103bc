//! The model as flat vectors: all of it, and its buckets.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::Error;

use crate::flat::{Flat, Gradients};
use crate::memory::{self, Category};

/// The model's flat vector: all segments one after another.
#[derive(Clone, Debug)]
pub struct Layout {
    ranges: Vec<Range<usize>>,
}

impl Layout {
    /// The layout of segments of these lengths.
    pub fn new(lengths: &[usize]) -> Self {
        let mut start = 0;
        let ranges = lengths
            .iter()
            .map(|len| {
                let range = start..start + len;
                start = range.end;
                range
            })
            .collect();
        Layout { ranges }
    }

    /// Elements of the whole.
    pub fn total(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// Number of segments.
    pub fn segments(&self) -> usize {
        self.ranges.len()
    }

    /// Elements of one segment.
    pub fn len(&self, segment: usize) -> usize {
        self.ranges[segment].len()
    }

    /// Elements of each segment, in forward order.
    pub(super) fn lengths(&self) -> Vec<usize> {
        self.ranges.iter().map(ExactSizeIterator::len).collect()
    }

    /// What a segment is called in messages: the embedding (whose table is the head's, too), a block or the norm after the last.
    pub(super) fn name(&self, segment: usize) -> String {
        match segment {
            0 => "embedding".into(),
            last if last + 1 == self.segments() => "final norm".into(),
            block => format!("block {}", block - 1),
        }
    }

    /// All of every segment.
    pub(super) fn everything(&self) -> Vec<Range<usize>> {
        self.ranges.iter().map(|range| 0..range.len()).collect()
    }

    /// The numbers of all segments.
    pub(super) fn all(&self) -> Vec<usize> {
        (0..self.segments()).collect()
    }

    /// Segments that follow one another, in so many groups of about as many elements, none of them empty.
    pub(super) fn fragments(&self, count: usize) -> Vec<Vec<usize>> {
        let mut fragments: Vec<Vec<usize>> = Vec::new();
        for segment in self.all() {
            let (groups, rest) = (fragments.len(), self.segments() - segment);
            let is_due = self.ranges[segment].start * count >= groups * self.total();
            match fragments.last_mut() {
                // As many segments as groups are left: each begins one.
                Some(open) if groups == count || !(is_due || rest <= count - groups) => open.push(segment),
                _ => fragments.push(vec![segment]),
            }
        }
        fragments
    }

    /// These elements of the flat vector, ascending, by their segments, counted from each one's start.
    pub(super) fn by_segment(&self, elements: &[usize]) -> Vec<Vec<usize>> {
        let within = |range: &Range<usize>| {
            let first = elements.partition_point(|element| *element < range.start);
            let end = elements.partition_point(|element| *element < range.end);
            elements[first..end].iter().map(|element| element - range.start).collect()
        };
        self.ranges.iter().map(within).collect()
    }

    /// None of any segment.
    pub(super) fn nothing(&self) -> Vec<Range<usize>> {
        vec![0..0; self.segments()]
    }

    /// A vector for each segment, with nothing in it yet.
    pub(super) fn vectors(&self) -> Vec<Flat> {
        vec![Flat::default(); self.segments()]
    }
}

/// Segments that travel together, one after another in the order in which their gradients come.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    /// Its segments, in its order.
    pub(super) segments: Vec<usize>,
    /// Where each begins, and where the last ends.
    starts: Vec<usize>,
    /// What it is called in errors and reports: its segments.
    pub(super) name: String,
}

impl Bucket {
    fn new(layout: &Layout, segments: Vec<usize>) -> Self {
        let mut starts = vec![0];
        for segment in &segments {
            starts.push(starts.last().copied().unwrap_or(0) + layout.len(*segment));
        }
        let names: Vec<String> = segments.iter().map(|segment| layout.name(*segment)).collect();
        Bucket { segments, starts, name: names.join(", ") }
    }

    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Elements of each segment, in the bucket's order.
    pub(super) fn lengths(&self) -> Vec<usize> {
        self.starts.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }

    /// The part of each segment that lies in `part` of the bucket, counted from the segment's start, in the bucket's order.
    pub(super) fn within(&self, part: &Range<usize>) -> Vec<(usize, Range<usize>)> {
        self.segments
            .iter()
            .zip(self.starts.windows(2))
            .map(|(segment, ends)| {
                let (start, end) = (ends[0].max(part.start), ends[1].min(part.end));
                (*segment, if start < end { start - ends[0]..end - ends[0] } else { 0..0 })
            })
            .collect()
    }

    /// Puts the parts of the bucket's segments in their places.
    pub(super) fn put_into(&self, parts: Vec<Flat>, segments: &mut [Flat]) {
        for (segment, part) in self.segments.iter().zip(parts) {
            segments[*segment] = part;
        }
    }
}

/// The buckets of a step: they are filled one after another as the backward pass ends their segments, and leave in that order.
pub(super) struct BucketFiller {
    plan: Vec<Bucket>,
    /// What each bucket's gradients are called.
    labels: Vec<Arc<str>>,
    /// The bucket that is being filled, how many of its segments have come, and their gradients.
    open: (usize, usize),
    grads: Flat,
    /// Whether they are where the next segment's gradients are being computed.
    lent: bool,
    /// Buckets that are full and have not left.
    full: VecDeque<(usize, Flat)>,
}

impl BucketFiller {
    /// Buckets that are closed once they hold `first` bytes of f32, and after the first `others` bytes.
    pub(super) fn new(layout: &Layout, first: usize, others: usize) -> Self {
        let plan = buckets(layout, (0..layout.segments()).rev(), first, others);
        let label = |(index, bucket): (usize, &Bucket)| format!("gradients, bucket {index}: {}", bucket.name).into();
        let labels = plan.iter().enumerate().map(label).collect();
        BucketFiller { plan, labels, open: (0, 0), grads: Flat::default(), lent: false, full: VecDeque::new() }
    }

    /// All buckets, in the order in which they leave.
    pub(super) fn plan(&self) -> &[Bucket] {
        &self.plan
    }

    /// A vector for each segment, with nothing in it yet.
    pub(super) fn vectors(&self) -> Vec<Flat> {
        vec![Flat::default(); self.plan.iter().map(|bucket| bucket.segments.len()).sum()]
    }

    /// What a bucket's gradients are called in errors and in the step's times.
    pub(super) fn label(&self, bucket: usize) -> Arc<str> {
        self.labels[bucket].clone()
    }

    /// The open bucket's gradients, for those of `segment` to be computed behind them; nothing where another segment's are next.
    pub(super) fn room(&mut self, segment: usize) -> Vec<f32> {
        let Some(bucket) = self.next(segment) else { return Vec::new() };
        let len = bucket.len();
        self.lent = true;
        match std::mem::take(&mut self.grads) {
            Flat::Host(values) if !values.is_empty() => values,
            _ => memory::within(Category::Gradients, || Vec::with_capacity(len)),
        }
    }

    /// The open bucket, where `segment` is its next.
    fn next(&self, segment: usize) -> Option<&Bucket> {
        let (index, come) = self.open;
        self.plan.get(index).filter(|bucket| bucket.segments.get(come) == Some(&segment))
    }

    /// Copies the gradients of the next segment into its bucket, unless they have been computed there.
    pub(super) fn add(&mut self, segment: usize, grads: Gradients) -> comm_core::Result<()> {
        let (index, come) = self.open;
        let bucket = self.next(segment);
        let bucket =
            bucket.ok_or_else(|| Error::Internal(format!("gradients of segment {segment} came out of order")))?;
        let (len, end, is_last) = (bucket.len(), bucket.starts[come + 1], come + 1 == bucket.segments.len());
        if std::mem::take(&mut self.lent) {
            self.grads = grads.into_flat()?;
            if self.grads.len() != end {
                return Err(Error::Internal(format!(
                    "what was lent for the gradients of segment {segment} did not come back"
                )));
            }
        } else {
            grads.append_to(&mut self.grads, len)?;
        }
        self.open = (index, come + 1);
        if is_last {
            self.full.push_back((index, std::mem::take(&mut self.grads)));
            self.open = (index + 1, 0);
        }
        Ok(())
    }

    /// Takes the next bucket that is full and has not left.
    pub(super) fn next_full(&mut self) -> Option<(usize, Flat)> {
        self.full.pop_front()
    }

    /// Begins again with the first bucket. Returns all buckets.
    pub(super) fn restart(&mut self) -> &[Bucket] {
        self.open = (0, 0);
        &self.plan
    }
}

/// These segments, in buckets that are closed once they hold `first` bytes of f32, and after the first `others` bytes.
pub(super) fn buckets(
    layout: &Layout,
    segments: impl Iterator<Item = usize>,
    first: usize,
    others: usize,
) -> Vec<Bucket> {
    let mut plan: Vec<Vec<usize>> = Vec::new();
    let mut open = 0;
    for segment in segments {
        let limit = if plan.len() == 1 { first } else { others };
        match plan.last_mut() {
            Some(bucket) if open < limit => bucket.push(segment),
            _ => {
                plan.push(vec![segment]);
                open = 0;
            }
        }
        open = open.saturating_add(layout.len(segment) * size_of::<f32>());
    }
    plan.into_iter().map(|segments| Bucket::new(layout, segments)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_close_once_full_and_keep_the_backward_order() {
        let layout = Layout::new(&[100, 10, 10, 10, 1]);
        let plan = |first, others| -> Vec<Vec<usize>> {
            buckets(&layout, (0..5).rev(), first, others).into_iter().map(|bucket| bucket.segments).collect()
        };
        assert_eq!(plan(44, 44), [vec![4, 3], vec![2, 1], vec![0]]);
        assert_eq!(plan(1, 44), [vec![4], vec![3, 2], vec![1, 0]]);
        assert_eq!(plan(usize::MAX, usize::MAX), [vec![4, 3, 2, 1, 0]]);
        assert_eq!(plan(0, 0), [vec![4], vec![3], vec![2], vec![1], vec![0]]);
    }

    #[test]
    fn fragments_are_about_as_long_and_never_empty() {
        let fragments = |lengths: &[usize], count| Layout::new(lengths).fragments(count);
        assert_eq!(fragments(&[4, 4, 4, 4], 2), [vec![0, 1], vec![2, 3]]);
        assert_eq!(fragments(&[100, 1, 1, 1], 2), [vec![0], vec![1, 2, 3]]);
        assert_eq!(fragments(&[1, 1, 1, 100], 3), [vec![0, 1], vec![2], vec![3]]);
        assert_eq!(fragments(&[1, 1], 2), [[0], [1]]);
        assert_eq!(fragments(&[5, 3, 4], 1), [[0, 1, 2]]);
        for count in 1..=6 {
            let parts = fragments(&[3000, 700, 700, 700, 700, 20], count);
            assert_eq!((parts.len(), parts.concat()), (count, vec![0, 1, 2, 3, 4, 5]));
        }
    }

    #[test]
    fn elements_are_found_in_their_segments() {
        assert_eq!(Layout::new(&[2, 3, 0, 1]).by_segment(&[1, 2, 4, 5]), [vec![1], vec![0, 2], vec![], vec![0]]);
        assert_eq!(Layout::new(&[2, 3]).by_segment(&[]), [vec![], Vec::<usize>::new()]);
    }

    #[test]
    fn a_part_of_a_bucket_is_found_in_its_segments() {
        let bucket = &buckets(&Layout::new(&[5, 3, 4]), (0..3).rev(), 28, 28)[0];
        assert_eq!((bucket.len(), bucket.lengths()), (7, vec![4, 3]));
        assert_eq!(bucket.within(&(2..6)), [(2, 2..4), (1, 0..2)]);
        assert_eq!(bucket.within(&(0..3)), [(2, 0..3), (1, 0..0)]);
    }

    #[test]
    fn buckets_are_filled_in_the_order_of_the_backward_pass() {
        let host = |values: &[f32]| Gradients::from(Flat::Host(values.to_vec()));
        let mut filler = BucketFiller::new(&Layout::new(&[1, 3, 4]), 28, 28);
        for _ in 0..2 {
            filler.add(2, host(&[1.0, 2.0, 3.0, 4.0])).unwrap();
            assert!(filler.next_full().is_none());
            assert!(filler.add(0, host(&[0.0])).is_err(), "segment 1 has not come");
            filler.add(1, host(&[5.0, 6.0, 7.0])).unwrap();
            filler.add(0, host(&[8.0])).unwrap();
            let (first, whole) = filler.next_full().unwrap();
            assert_eq!((first, whole.into_host().unwrap()), (0, vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]));
            let (second, whole) = filler.next_full().unwrap();
            assert_eq!((second, whole.into_host().unwrap()), (1, vec![8.0]));
            assert!(filler.next_full().is_none());
            filler.restart();
        }
    }

    #[test]
    fn gradients_computed_in_their_bucket_are_not_copied() {
        let mut filler = BucketFiller::new(&Layout::new(&[1, 3, 4]), 28, 28);
        assert_eq!(filler.room(1).capacity(), 0, "segment 2 is next");
        let mut start = None;
        for (segment, own) in [(2, vec![1.0, 2.0, 3.0, 4.0]), (1, vec![5.0, 6.0, 7.0])] {
            let mut values = filler.room(segment);
            assert!(values.capacity() >= 7);
            values.extend(own);
            assert_eq!(*start.get_or_insert(values.as_ptr()), values.as_ptr());
            filler.add(segment, Flat::Host(values).into()).unwrap();
        }
        let (_, whole) = filler.next_full().unwrap();
        assert_eq!(whole.into_host().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        filler.room(0);
        assert!(filler.add(0, Flat::Host(vec![1.0, 2.0]).into()).is_err(), "one gradient was to come behind nothing");
    }
}
