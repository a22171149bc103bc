//! What is kept of a bucket's elements, in segments, as checkpoints have it.

use std::ops::Range;

use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::strategy::layout::Bucket;
use crate::strategy::{KeptValues, KeptVector, SavedKept};

/// The part of each segment of `values`, which are kept of the elements of `bucket` from `start` on.
pub(super) fn kept_of<'a>(bucket: &Bucket, what: Kept, start: usize, values: &'a [f32]) -> Vec<KeptVector<'a>> {
    let (mut kept, mut rest) = (Vec::new(), values);
    for (segment, range) in bucket.within(&(start..start + values.len())) {
        let (own, others) = rest.split_at(range.len());
        if !own.is_empty() {
            kept.push(KeptVector { what, segment, start: range.start, values: KeptValues::Host(own) });
        }
        rest = others;
    }
    kept
}

/// What was kept of the elements `range` of `bucket`, with zeros where nothing was.
///
/// # Errors
/// What cannot be read.
pub(super) fn read_kept(
    bucket: &Bucket,
    what: Kept,
    range: &Range<usize>,
    saved: &mut SavedKept<'_>,
) -> Result<Vec<f32>, TrainError> {
    let mut values = Vec::with_capacity(range.len());
    for (segment, own) in bucket.within(range).into_iter().filter(|(_, own)| !own.is_empty()) {
        let len = own.len();
        values.extend((saved.read)(segment, what, own)?.unwrap_or_else(|| vec![0.0; len]));
    }
    Ok(values)
}
