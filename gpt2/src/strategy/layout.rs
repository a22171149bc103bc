//! The model as flat vectors: all of it, and its buckets.

use std::ops::Range;

use crate::flat::Flat;

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

    /// None of any segment.
    pub(super) fn nothing(&self) -> Vec<Range<usize>> {
        vec![0..0; self.segments()]
    }

    /// The part of each segment that lies in `part` of the flat vector, counted from the segment's start.
    pub(super) fn within(&self, part: &Range<usize>) -> Vec<Range<usize>> {
        self.ranges
            .iter()
            .map(|range| {
                let (start, end) = (range.start.max(part.start), range.end.min(part.end));
                if start < end { start - range.start..end - range.start } else { 0..0 }
            })
            .collect()
    }

    /// The elements `part` of the flat vector.
    pub(super) fn gather(&self, segments: &[Flat], part: &Range<usize>) -> comm_core::Result<Flat> {
        Flat::concat_of(segments.iter().zip(self.within(part)))
    }

    /// Cuts the elements `part` of the flat vector into their segments.
    pub(super) fn cut(&self, flat: Flat, part: &Range<usize>) -> Vec<Flat> {
        let lengths: Vec<usize> = self.within(part).into_iter().map(|range| range.len()).collect();
        flat.split(&lengths)
    }
}

/// Segments that travel together, one after another in the order in which their gradients come.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    /// Its segments, last to first.
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

    /// Cuts the bucket's values into its segments'.
    pub(super) fn cut_into(&self, flat: Flat, segments: &mut [Flat]) {
        for (segment, part) in self.segments.iter().zip(flat.split(&self.lengths())) {
            segments[*segment] = part;
        }
    }

    /// Whether all its segments' gradients have come.
    pub(super) fn is_complete(&self, waiting: &[Option<Flat>]) -> bool {
        self.segments.iter().all(|segment| waiting[*segment].is_some())
    }

    /// Takes its segments' gradients out of `waiting`, as one vector; `None` while one has not come.
    pub(super) fn take(&self, waiting: &mut [Option<Flat>]) -> Option<comm_core::Result<Flat>> {
        if !self.is_complete(waiting) {
            return None;
        }
        Some(Flat::concat(self.segments.iter().filter_map(|segment| waiting[*segment].take()), self.len()))
    }
}

/// Segments from last to first, in buckets that are closed once they hold `first` bytes of f32, and after the first `others` bytes.
pub(super) fn buckets(layout: &Layout, first: usize, others: usize) -> Vec<Bucket> {
    let mut plan: Vec<Vec<usize>> = Vec::new();
    let mut open = 0;
    for segment in (0..layout.segments()).rev() {
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
            buckets(&layout, first, others).into_iter().map(|bucket| bucket.segments).collect()
        };
        assert_eq!(plan(44, 44), [vec![4, 3], vec![2, 1], vec![0]]);
        assert_eq!(plan(1, 44), [vec![4], vec![3, 2], vec![1, 0]]);
        assert_eq!(plan(usize::MAX, usize::MAX), [vec![4, 3, 2, 1, 0]]);
        assert_eq!(plan(0, 0), [vec![4], vec![3], vec![2], vec![1], vec![0]]);
    }

    #[test]
    fn a_part_of_a_bucket_is_found_in_its_segments() {
        let bucket = &buckets(&Layout::new(&[5, 3, 4]), 28, 28)[0];
        assert_eq!((bucket.len(), bucket.lengths()), (7, vec![4, 3]));
        assert_eq!(bucket.within(&(2..6)), [(2, 2..4), (1, 0..2)]);
        assert_eq!(bucket.within(&(0..3)), [(2, 0..3), (1, 0..0)]);
        let mut waiting = vec![None, Some(Flat::Host(vec![5.0, 6.0, 7.0])), None];
        assert!(bucket.take(&mut waiting).is_none());
        waiting[2] = Some(Flat::Host(vec![1.0, 2.0, 3.0, 4.0]));
        let whole = bucket.take(&mut waiting).unwrap().unwrap();
        assert_eq!(whole.into_host().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    }
}
