//! A worker's gradients on their way to a server, compressed. What the server gives back is parameters, which are not.

use std::sync::Arc;

use comm_core::Buffer;

use super::Compression;
use super::encoding::Encoding;
use super::keeping::{kept_of, read_kept};
use super::top_k;
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::memory::{self, Category};
use crate::strategy::layout::Bucket;
use crate::strategy::{KeptVector, SavedKept};

/// Bytes that a bucket of `count` gradients takes on its way to a server; `None` where they are not compressed.
pub(in crate::strategy) fn pushed_bytes(compress: Compression, count: usize) -> Option<usize> {
    compress.encoding().map(|encoding| encoding.bytes(count))
}

/// The gradients of a worker.
#[derive(Debug)]
pub(in crate::strategy) struct Push {
    encoding: Arc<dyn Encoding>,
    /// What of each bucket has not been sent.
    left: Vec<Vec<f32>>,
}

impl Push {
    /// In these buckets; `None` where gradients are not compressed.
    pub(in crate::strategy) fn new(compress: Compression, buckets: &[Bucket]) -> Option<Self> {
        let encoding = compress.encoding()?;
        let zeros = |bucket: &Bucket| memory::within(Category::Optimizer, || vec![0.0; bucket.len()]);
        Some(Push { encoding, left: buckets.iter().map(zeros).collect() })
    }

    /// What leaves of a bucket's gradients, and of what was left of the ones before.
    pub(in crate::strategy) fn encode(&mut self, bucket: usize, grads: Vec<f32>) -> Buffer {
        let left = &mut self.left[bucket];
        left.iter_mut().zip(&grads).for_each(|(left, own)| *left += own);
        drop(grads);
        let mut bytes = vec![0; self.encoding.bytes(left.len())];
        self.encoding.encode(left, &mut bytes);
        Buffer::from_vec(bytes)
    }

    /// What it keeps for the next step, of these buckets.
    pub(in crate::strategy) fn kept(&self, buckets: &[Bucket]) -> Vec<KeptVector<'_>> {
        let kept = buckets.iter().zip(&self.left).flat_map(|(bucket, left)| kept_of(bucket, Kept::Left, 0, left));
        kept.collect()
    }

    /// Goes on with what was kept of these buckets. Where that is the mean of all ranks', it is multiplied by `shares`: ranks whose gradients
    /// are averaged for each that pushes, so that as much is still to be added to a mean as it was.
    ///
    /// # Errors
    /// What cannot be read.
    pub(in crate::strategy) fn restore(
        &mut self,
        buckets: &[Bucket],
        shares: f32,
        saved: &mut SavedKept<'_>,
    ) -> Result<(), TrainError> {
        for (bucket, left) in buckets.iter().zip(&mut self.left) {
            *left = read_kept(bucket, Kept::Left, &(0..bucket.len()), saved)?;
            if saved.is_mean {
                left.iter_mut().for_each(|left| *left *= shares);
            }
        }
        Ok(())
    }
}

/// The gradients of workers, on a server.
#[derive(Clone, Debug)]
pub(in crate::strategy) struct Pushed {
    encoding: Arc<dyn Encoding>,
}

impl Pushed {
    /// In these buckets; `None` where gradients are not compressed.
    ///
    /// # Errors
    /// `InvalidArgument` for a bucket that is too large for the compression.
    pub(in crate::strategy) fn new(compress: Compression, buckets: &[Bucket]) -> comm_core::Result<Option<Self>> {
        let Some(encoding) = compress.encoding() else { return Ok(None) };
        if let Compression::TopK { .. } = compress {
            buckets.iter().try_for_each(|bucket| top_k::check(bucket.len()))?;
        }
        Ok(Some(Pushed { encoding }))
    }

    /// Room for what comes of a bucket of `count` gradients.
    pub(in crate::strategy) fn room(&self, count: usize) -> Buffer {
        Buffer::from_vec(vec![0u8; self.encoding.bytes(count)])
    }

    /// Adds what has come of `worker`'s gradients to `sums`.
    ///
    /// # Errors
    /// `Protocol` for bytes that no rank encodes.
    pub(in crate::strategy) fn add(&self, bytes: Buffer, sums: &mut [f32], worker: usize) -> comm_core::Result<()> {
        self.encoding.add(&bytes.into_vec::<u8>()?, sums, worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flat::Flat;
    use crate::strategy::Layout;
    use crate::strategy::layout::buckets;

    #[test]
    fn what_is_left_goes_with_the_next_gradients() {
        let plan = buckets(&Layout::new(&[300]), 0..1, 1, 1);
        let own: Vec<f32> = (0..300).map(|place| place as f32 - 150.0).collect();
        for compress in [Compression::Int8, Compression::Sign, Compression::TopK { fraction: 0.1 }] {
            let (mut push, mut sums) = (Push::new(compress, &plan).unwrap(), vec![0.0; 300]);
            let server = Pushed::new(compress, &plan).unwrap().unwrap();
            (0..20).for_each(|_| server.add(push.encode(0, own.clone()), &mut sums, 1).unwrap());
            for ((own, sum), left) in own.iter().zip(&sums).zip(&push.left[0]) {
                assert!((sum + left - 20.0 * own).abs() < 0.05, "{compress}: {sum} + {left} of 20 times {own}");
            }
        }
    }

    #[test]
    fn what_is_kept_of_segments_is_what_the_buckets_go_on_with() {
        let layout = Layout::new(&[300, 20, 9]);
        let plan = buckets(&layout, (0..3).rev(), 40, 40);
        assert_eq!(plan.iter().map(|bucket| bucket.segments.clone()).collect::<Vec<_>>(), [vec![2, 1], vec![0]]);
        let push = || Push::new(Compression::Sign, &plan).unwrap();
        let mut first = push();
        for (number, bucket) in plan.iter().enumerate() {
            first.encode(number, (0..bucket.len()).map(|place| (place * place) as f32 - 9.0).collect());
        }
        let kept: Vec<(usize, Vec<f32>)> = first
            .kept(&plan)
            .iter()
            .map(|kept| (kept.segment, kept.values.part(0..kept.values.len()).unwrap().into()))
            .collect();
        assert_eq!(
            kept.iter().map(|(segment, left)| (*segment, left.len())).collect::<Vec<_>>(),
            [(2, 9), (1, 20), (0, 300)]
        );
        let read = &mut |segment: usize, what: Kept, range: std::ops::Range<usize>| {
            assert_eq!(what, Kept::Left);
            Ok(kept.iter().find(|(of, _)| *of == segment).map(|(_, left)| left[range].to_vec()))
        };
        let place = Flat::Host;
        for (is_mean, factor) in [(false, 1.0), (true, 1.5)] {
            let mut second = push();
            second.restore(&plan, 1.5, &mut SavedKept { read, is_mean, place: &place }).unwrap();
            let of_both = first.left.iter().flatten().zip(second.left.iter().flatten());
            assert!(of_both.clone().all(|(one, other)| one * factor == *other) && of_both.count() == 329);
        }
    }
}
