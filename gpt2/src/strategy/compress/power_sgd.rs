//! PowerSGD: two factors of each matrix.

use std::ops::Range;

use comm_core::splitmix::SplitMix64;
use comm_core::{Algorithm, Buffer, Error, Op, ReduceOp};
use rayon::prelude::*;

use super::strategy::{Codec, ExpectedOperation, ReadKept};
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::memory::{self, Category};
use crate::segments::{ParamInfo, SegmentInfo};
use crate::strategy::channels::{Channel, Pending, Route};

/// What a seed is used for, so that other uses draw other numbers.
const PURPOSE: u64 = 0x504f_5745_5253;

/// The mean over all ranks.
const MEAN: Op = Op::AllReduce(ReduceOp::Mean);

/// Rows and columns of a tensor that is sent as factors of `rank` columns.
fn factored(param: &ParamInfo, rank: usize) -> Option<(usize, usize)> {
    let [rows, cols] = param.shape[..] else { return None };
    ((rows + cols).checked_mul(rank)? < rows * cols).then_some((rows, cols))
}

/// What a bucket of `count` elements, of these segments, takes.
pub(super) fn operations<'a>(
    rank: usize,
    count: usize,
    segments: impl Iterator<Item = &'a SegmentInfo>,
) -> Vec<ExpectedOperation> {
    let matrices = segments.flat_map(|segment| &segment.params).filter_map(|param| factored(param, rank));
    let (mut first, mut second) = (count, 0);
    for (rows, cols) in matrices {
        first = first - rows * cols + rows * rank;
        second += cols * rank;
    }
    [first, second].into_iter().filter(|count| *count > 0).map(|count| ExpectedOperation::floats(MEAN, count)).collect()
}

/// A matrix of gradients, in rows, as the product of a left factor with orthonormal columns and a right one. Both are kept column by column.
struct Matrix {
    /// Where it lies in its bucket.
    range: Range<usize>,
    cols: usize,
    /// The seed, and what tells it from the model's others.
    path: [u64; 3],
    /// This rank's gradients, and what is left of them.
    left: Vec<f32>,
    /// The left factor, of all ranks' gradients.
    columns: Vec<Vec<f32>>,
    /// The right factor, of all ranks' gradients of the step before, one column of it after another: with it the next one begins.
    right: Vec<f32>,
}

impl Matrix {
    fn new(range: Range<usize>, cols: usize, rank: usize, path: [u64; 3]) -> Self {
        memory::within(Category::Optimizer, || Matrix {
            left: vec![0.0; range.len()],
            right: vec![0.0; rank * cols],
            columns: Vec::new(),
            range,
            cols,
            path,
        })
    }

    /// The columns of the factors.
    fn rank(&self) -> usize {
        self.right.len() / self.cols
    }

    /// The matrix times the right factor, row by row: what ranks average first.
    fn times_right(&mut self, own: &[f32]) -> Vec<f32> {
        self.left.iter_mut().zip(own).for_each(|(left, own)| *left += own);
        // A direction in which nothing was found gives way to another.
        let rank = self.rank();
        let rows = self.right.chunks_mut(self.cols).enumerate();
        for (number, row) in rows.filter(|(_, row)| row.iter().all(|value| *value == 0.0)) {
            let [seed, segment, offset] = self.path;
            let mut random = SplitMix64::stream(seed, &[PURPOSE, segment, offset, number as u64]);
            row.iter_mut().for_each(|value| *value = random.unit() as f32 - 0.5);
        }
        let mut product = vec![0.0; self.left.len() / self.cols * rank];
        product.par_chunks_mut(rank).zip(self.left.par_chunks(self.cols)).for_each(|(out, own)| {
            out.iter_mut().zip(self.right.chunks(self.cols)).for_each(|(out, row)| *out = dot(own, row));
        });
        product
    }

    /// Takes the mean of all ranks' products with the right factor: its columns, orthonormal, become the left one. Returns this rank's right
    /// factor, column by column, and keeps what the product of both leaves of the matrix.
    fn factor(&mut self, mean: &[f32]) -> Vec<f32> {
        let rank = self.rank();
        self.columns = (0..rank).map(|column| mean.iter().skip(column).step_by(rank).copied().collect()).collect();
        orthonormal(&mut self.columns);
        let own = left_times(&self.columns, &self.left, self.cols);
        let (columns, cols) = (&self.columns, self.cols);
        self.left.par_chunks_mut(cols).enumerate().for_each(|(row, left)| {
            columns.iter().zip(own.chunks(cols)).for_each(|(column, own)| add_scaled(left, -column[row], own));
        });
        own
    }

    /// Takes the mean of all ranks' right factors. Writes the product of both, the mean of all matrices as far as they are told by it.
    fn product(&mut self, mean: &[f32], out: &mut [f32]) {
        self.right.copy_from_slice(mean);
        let (columns, right, cols) = (std::mem::take(&mut self.columns), &self.right, self.cols);
        // In one order on all ranks: all get the same bits.
        out.par_chunks_mut(self.cols).enumerate().for_each(|(row, out)| {
            out.fill(0.0);
            columns.iter().zip(right.chunks(cols)).for_each(|(column, values)| add_scaled(out, column[row], values));
        });
    }
}

/// Σ a·b.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    /// Sums that are taken side by side.
    const LANES: usize = 16;
    let mut lanes = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, (a, b))| *lane += a * b);
    }
    lanes.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

/// `values += factor · other`.
fn add_scaled(values: &mut [f32], factor: f32, other: &[f32]) {
    values.iter_mut().zip(other).for_each(|(value, other)| *value += factor * other);
}

/// For each of `columns` the sum of the rows of `matrix`, of `cols` columns, weighed by it.
fn left_times(columns: &[Vec<f32>], matrix: &[f32], cols: usize) -> Vec<f32> {
    /// Columns of the matrix that a thread takes at a time.
    const GROUP: usize = 1024;
    let group = |first: usize| {
        let width = GROUP.min(cols - first);
        let mut sums = vec![0.0; columns.len() * width];
        for (row, values) in matrix.chunks(cols).enumerate() {
            let sums = sums.chunks_mut(width).zip(columns);
            sums.for_each(|(sums, column)| add_scaled(sums, column[row], &values[first..first + width]));
        }
        (first, width, sums)
    };
    let firsts: Vec<usize> = (0..cols).step_by(GROUP).collect();
    let groups: Vec<_> = firsts.into_par_iter().map(group).collect();
    let mut product = vec![0.0; columns.len() * cols];
    for (first, width, sums) in groups {
        let rows = product.chunks_mut(cols).zip(sums.chunks(width));
        rows.for_each(|(row, sums)| row[first..first + width].copy_from_slice(sums));
    }
    product
}

/// Makes vectors orthonormal, one after another (Gram and Schmidt, twice each, in f64); of what depends on those before it nothing is left. A
/// function of the values alone, whatever the machine.
fn orthonormal(vectors: &mut [Vec<f32>]) {
    /// What is left of a vector that is a sum of others, for its rounding.
    const DEPENDENT: f64 = 1e-6;
    let product = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    for index in 0..vectors.len() {
        let (before, rest) = vectors.split_at_mut(index);
        let Some(own) = rest.first_mut() else { continue };
        let whole = product(own, own).sqrt();
        for _ in 0..2 {
            for other in &*before {
                let share = product(own, other);
                own.iter_mut().zip(other).for_each(|(own, other)| {
                    *own = (f64::from(*own) - share * f64::from(*other)) as f32;
                });
            }
        }
        let norm = product(own, own).sqrt();
        // What is no number stays, so that everybody sees it.
        let factor = if norm <= DEPENDENT * whole { 0.0 } else { 1.0 / norm };
        own.iter_mut().for_each(|own| *own = (f64::from(*own) * factor) as f32);
    }
}

/// What is under way.
enum UnderWay {
    Nothing,
    /// The products with the right factors, and all that is no matrix.
    Products(Pending),
    /// The right factors, and the means of what is no matrix.
    Factors(Option<Pending>, Vec<f32>),
}

/// A bucket.
pub(super) struct PowerSgd {
    matrices: Vec<Matrix>,
    /// What is sent as it is.
    rest: Vec<Range<usize>>,
    /// What another compression had not sent of that when a run goes on; it goes with the next gradients. Empty after that.
    carried: Vec<f32>,
    count: usize,
    algorithm: Option<Algorithm>,
    under_way: UnderWay,
}

impl PowerSgd {
    /// Of segments that follow one another, each with its number, its length and what it consists of: where that is not known, nothing in it is
    /// taken for a matrix.
    pub(super) fn new<'a>(
        rank: usize,
        seed: u64,
        segments: impl Iterator<Item = (usize, usize, Option<&'a SegmentInfo>)>,
        algorithm: Option<Algorithm>,
    ) -> Self {
        let (mut matrices, mut start) = (Vec::new(), 0);
        for (segment, len, info) in segments {
            for param in info.iter().flat_map(|info| &info.params) {
                let Some((_, cols)) = factored(param, rank) else { continue };
                let range = start + param.offset..start + param.offset + param.len;
                matrices.push(Matrix::new(range, cols, rank, [seed, segment as u64, param.offset as u64]));
            }
            start += len;
        }
        PowerSgd::of(matrices, start, algorithm)
    }

    /// Of these matrices, ascending, in a bucket of `count` elements.
    fn of(matrices: Vec<Matrix>, count: usize, algorithm: Option<Algorithm>) -> Self {
        let (mut rest, mut end) = (Vec::new(), 0);
        for Matrix { range, .. } in &matrices {
            rest.push(end..range.start);
            end = range.end;
        }
        rest.push(end..count);
        rest.retain(|range| !range.is_empty());
        PowerSgd { matrices, rest, carried: Vec::new(), count, algorithm, under_way: UnderWay::Nothing }
    }
}

impl Codec for PowerSgd {
    fn start(&mut self, grads: Vec<f32>, channel: &Channel, route: Route) -> comm_core::Result<()> {
        let values = channel.packing(|| {
            let mut values = Vec::new();
            self.matrices.iter_mut().for_each(|matrix| values.extend(matrix.times_right(&grads[matrix.range.clone()])));
            let start = values.len();
            self.rest.iter().for_each(|range| values.extend_from_slice(&grads[range.clone()]));
            values[start..].iter_mut().zip(std::mem::take(&mut self.carried)).for_each(|(value, left)| *value += left);
            values
        });
        let route = route.by(self.algorithm);
        self.under_way = UnderWay::Products(channel.start(MEAN, Buffer::from_vec(values), route));
        Ok(())
    }

    fn go_on(&mut self, channel: &Channel, route: Route) -> comm_core::Result<()> {
        let UnderWay::Products(pending) = std::mem::replace(&mut self.under_way, UnderWay::Nothing) else {
            return Err(Error::Internal("no products are under way".into()));
        };
        let mut means = pending.wait()?.into_vec::<f32>()?;
        let factors = channel.packing(|| {
            let (mut factors, mut start) = (Vec::new(), 0);
            for matrix in &mut self.matrices {
                let end = start + matrix.range.len() / matrix.cols * matrix.rank();
                factors.extend(matrix.factor(&means[start..end]));
                start = end;
            }
            means.drain(..start);
            factors
        });
        let started =
            (!factors.is_empty()).then(|| channel.start(MEAN, Buffer::from_vec(factors), route.by(self.algorithm)));
        self.under_way = UnderWay::Factors(started, means);
        Ok(())
    }

    fn finish(&mut self, channel: &Channel) -> comm_core::Result<Vec<f32>> {
        let UnderWay::Factors(pending, plain) = std::mem::replace(&mut self.under_way, UnderWay::Nothing) else {
            return Err(Error::Internal("no factors are under way".into()));
        };
        let factors = pending.map_or(Ok(Vec::new()), |pending| pending.wait()?.into_vec::<f32>())?;
        Ok(channel.unpacking(|| {
            let mut mean = vec![0.0; self.count];
            let (mut factors, mut plain) = (&factors[..], &plain[..]);
            for matrix in &mut self.matrices {
                let (own, others) = factors.split_at(matrix.right.len());
                matrix.product(own, &mut mean[matrix.range.clone()]);
                factors = others;
            }
            for range in &self.rest {
                let (own, others) = plain.split_at(range.len());
                mean[range.clone()].copy_from_slice(own);
                plain = others;
            }
            mean
        }))
    }

    fn kept(&self) -> Vec<(Kept, usize, &[f32])> {
        let mut kept = Vec::new();
        for Matrix { range, left, right, .. } in &self.matrices {
            kept.push((Kept::Left, range.start, left.as_slice()));
            // It has fewer elements than the matrix: see `factored`.
            kept.push((Kept::Factor, range.start, right.as_slice()));
        }
        kept
    }

    fn restore(&mut self, read: ReadKept<'_>) -> Result<(), TrainError> {
        for matrix in &mut self.matrices {
            matrix.left = read(Kept::Left, matrix.range.clone())?;
            let start = matrix.range.start;
            matrix.right = read(Kept::Factor, start..start + matrix.right.len())?;
        }
        let rest = self.rest.iter().map(|range| read(Kept::Left, range.clone()));
        self.carried = rest.collect::<Result<Vec<_>, _>>()?.concat();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flat::Packer;
    use crate::precision::Precision;
    use crate::record::EVERYONE;
    use comm_core::{Communicator, local};

    const RANKS: usize = 3;

    /// The gradients of a rank in a step: a matrix of `rows` rows, and three numbers before and two behind it.
    fn gradients(rank: usize, step: u64, (rows, cols): (usize, usize)) -> Vec<f32> {
        let mut random = SplitMix64::stream(step, &[rank as u64]);
        (0..3 + rows * cols + 2).map(|_| random.unit() as f32 - 0.5).collect()
    }

    /// What each step gives on each rank, and what is left of the matrix after it, with factors of `rank` columns.
    fn run(shape: (usize, usize), rank: usize, steps: u64) -> Vec<Vec<(Vec<f32>, Vec<f32>)>> {
        let (rows, cols) = shape;
        local::run(RANKS, |comm| {
            let own = comm.rank();
            let all = comm.split(Some(0), 0).unwrap().unwrap();
            let channel = Channel::new(all, EVERYONE, Packer::new(Precision::F32, None), Category::Gradients);
            let matrix = Matrix::new(3..3 + rows * cols, cols, rank, [7, 0, 0]);
            let mut codec = PowerSgd::of(vec![matrix], rows * cols + 5, None);
            let step = |step| {
                codec.start(gradients(own, step, shape), &channel, Route::blocking("first")).unwrap();
                codec.go_on(&channel, Route::blocking("second")).unwrap();
                (codec.finish(&channel).unwrap(), codec.matrices[0].left.clone())
            };
            (0..steps).map(step).collect()
        })
    }

    /// The mean of all ranks' gradients.
    fn mean(step: u64, shape: (usize, usize)) -> Vec<f32> {
        let all: Vec<Vec<f32>> = (0..RANKS).map(|rank| gradients(rank, step, shape)).collect();
        (0..all[0].len()).map(|index| all.iter().map(|own| own[index]).sum::<f32>() / RANKS as f32).collect()
    }

    fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn of_full_rank_nothing_is_lost_but_by_rounding() {
        for (shape, rank) in [((6, 40), 6), ((40, 6), 6), ((8, 8), 8), ((5, 7), 9)] {
            let ranks = run(shape, rank, 3);
            for (step, (sum, left)) in ranks[0].iter().enumerate() {
                let off = largest_difference(sum, &mean(step as u64, shape));
                assert!(off < 1e-5, "{shape:?} in step {step}: {off:e}");
                // What this rank has and the others have not lies in the same space.
                let lost = left.iter().fold(0.0f32, |most, left| most.max(left.abs()));
                assert!(shape.0 > rank || lost < 1e-5, "{shape:?} in step {step}: {lost:e}");
            }
        }
    }

    #[test]
    fn every_rank_gets_the_same_and_what_is_lost_is_left() {
        let shape = (12, 20);
        let ranks = run(shape, 2, 4);
        for step in 0..4 {
            let (sum, _) = &ranks[0][step];
            assert!(ranks.iter().all(|rank| rank[step].0 == *sum), "step {step}");
            let plain = mean(step as u64, shape);
            assert!(largest_difference(&sum[..3], &plain[..3]) < 1e-6);
            // The mean of what is left on all ranks, with the mean of all that was sent, is the mean of all gradients so far.
            let sent = |index: usize| (0..=step).map(|step| ranks[0][step].0[3 + index]).sum::<f32>();
            let left = |index: usize| ranks.iter().map(|rank| rank[step].1[index]).sum::<f32>() / RANKS as f32;
            let all = |index: usize| (0..=step).map(|step| mean(step as u64, shape)[3 + index]).sum::<f32>();
            for index in 0..shape.0 * shape.1 {
                let off = (sent(index) + left(index) - all(index)).abs();
                assert!(off < 1e-5, "step {step}, element {index}: {off:e}");
            }
            assert!(largest_difference(&sum[3..243], &plain[3..243]) > 0.1, "two columns cannot be all of it");
        }
    }

    #[test]
    fn what_another_compression_left_of_what_is_sent_as_it_is_goes_with_the_next_gradients() {
        let (rows, cols) = (12, 20);
        let means = local::run(RANKS, |comm| {
            let own = comm.rank();
            let all = comm.split(Some(0), 0).unwrap().unwrap();
            let channel = Channel::new(all, EVERYONE, Packer::new(Precision::F32, None), Category::Gradients);
            let mut codec =
                PowerSgd::of(vec![Matrix::new(3..3 + rows * cols, cols, 2, [7, 0, 0])], rows * cols + 5, None);
            let left = |what, range: Range<usize>| Ok(vec![if what == Kept::Left { 4.0 } else { 0.0 }; range.len()]);
            codec.restore(&mut { left }).unwrap();
            let mut step = |step| {
                codec.start(gradients(own, step, (rows, cols)), &channel, Route::blocking("first")).unwrap();
                codec.go_on(&channel, Route::blocking("second")).unwrap();
                codec.finish(&channel).unwrap()
            };
            [step(0), step(1)]
        });
        for (step, more) in [(0, 4.0), (1, 0.0)] {
            let plain = mean(step as u64, (rows, cols));
            for index in [0, 1, 2, 3 + rows * cols, 4 + rows * cols] {
                assert!((means[0][step][index] - plain[index] - more).abs() < 1e-6, "step {step}, element {index}");
            }
        }
    }

    #[test]
    fn a_factor_is_kept_in_one_piece_whatever_its_rank() {
        let matrix = Matrix::new(3..3 + 40 * 60, 60, 8, [7, 0, 0]);
        let codec = PowerSgd::of(vec![matrix], 40 * 60 + 5, None);
        let pieces: Vec<_> =
            codec.kept().into_iter().map(|(what, start, values)| (what, start, values.len())).collect();
        assert_eq!(pieces, [(Kept::Left, 3, 40 * 60), (Kept::Factor, 3, 8 * 60)]);
    }

    #[test]
    fn vectors_that_depend_on_others_are_left_out() {
        let mut vectors = vec![vec![3.0, 4.0, 0.0], vec![6.0, 8.0, 0.0], vec![0.0, 0.0, 0.0], vec![1.0, 1.0, 1.0]];
        orthonormal(&mut vectors);
        assert_eq!(vectors[0], [0.6, 0.8, 0.0]);
        assert_eq!([&vectors[1], &vectors[2]], [&[0.0; 3]; 2]);
        assert!(dot(&vectors[0], &vectors[3]).abs() < 1e-6 && (dot(&vectors[3], &vectors[3]) - 1.0).abs() < 1e-6);
        let mut spoilt = vec![vec![1.0, f32::NAN], vec![1.0, 0.0]];
        orthonormal(&mut spoilt);
        assert!(spoilt.iter().flatten().all(|value| value.is_nan()));
    }
}
