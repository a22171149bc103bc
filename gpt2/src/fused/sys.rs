//! Products of matrices by the crate `gemm`, behind types that say where the elements lie; and memory that is written before it is read.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use gemm::Parallelism;
use rayon::prelude::*;

/// Who computes a product. No bit depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Threads {
    /// The calling thread.
    One,
    /// All threads of the current rayon pool, where the product is large enough.
    Pool,
}

/// A matrix of f32 that lies in a slice: element (i, j) is `values[i · row_stride + j · col_stride]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows that follow one another.
    ///
    /// # Panics
    /// If `values` are not `rows · cols`.
    pub(crate) fn new(values: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(values.len(), rows * cols, "a matrix of {rows} × {cols}");
        Self::strided(values, rows, cols, cols)
    }

    /// Rows that begin `stride` elements after one another.
    ///
    /// # Panics
    /// If the last element is not in `values`.
    pub(crate) fn strided(values: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        check(values.len(), rows, cols, stride);
        Self { values, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        let Self { values, rows, cols, row_stride, col_stride } = self;
        Self { values, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let start = (rows.start * self.row_stride).min(self.values.len());
        Self { values: &self.values[start..], rows: rows.len(), ..self }
    }

    /// Row `i` of a matrix whose rows are in one piece.
    ///
    /// # Panics
    /// If there is none, or the matrix is transposed.
    pub(crate) fn row(self, i: usize) -> &'a [f32] {
        assert!(i < self.rows && self.col_stride == 1, "row {i} of {}", self.rows);
        &self.values[i * self.row_stride..][..self.cols]
    }
}

/// A matrix of f32 with rows in one piece each, which nobody else reads or writes.
#[derive(Debug)]
pub(crate) struct MatrixMut<'a> {
    /// Element (i, j) is at `i · stride + j`, for every i below `rows` and j below `cols`; those elements are borrowed for `'a`, uniquely.
    start: *mut f32,
    rows: usize,
    cols: usize,
    /// At least `cols`, so that elements are distinct.
    stride: usize,
    elements: PhantomData<&'a mut [f32]>,
}

// SAFETY: it is a unique borrow of f32 values, as `&mut [f32]` is.
unsafe impl Send for MatrixMut<'_> {}

impl<'a> MatrixMut<'a> {
    /// Rows that follow one another.
    ///
    /// # Panics
    /// If `values` are not `rows · cols`.
    pub(crate) fn new(values: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(values.len(), rows * cols, "a matrix of {rows} × {cols}");
        Self::strided(values, rows, cols, cols)
    }

    /// Rows that begin `stride` elements after one another.
    ///
    /// # Panics
    /// If rows overlap, or the last element is not in `values`.
    pub(crate) fn strided(values: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        check(values.len(), rows, cols, stride);
        assert!(stride >= cols, "rows of {cols} every {stride}");
        Self { start: values.as_mut_ptr(), rows, cols, stride, elements: PhantomData }
    }

    /// The matrix cut into groups of `width` columns, from left to right.
    ///
    /// # Panics
    /// If the columns cannot be cut so.
    pub(crate) fn column_groups(self, width: usize) -> impl Iterator<Item = MatrixMut<'a>> {
        assert!(width > 0 && self.cols.is_multiple_of(width), "{} columns in groups of {width}", self.cols);
        let Self { start, rows, cols, stride, .. } = self;
        (0..cols / width).map(move |group| MatrixMut {
            // Of an empty matrix the pointer is never read; otherwise it stays in its first row.
            start: start.wrapping_add(group * width),
            rows,
            cols: width,
            stride,
            elements: PhantomData,
        })
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// If there are fewer.
    pub(crate) fn rows(&mut self, rows: Range<usize>) -> MatrixMut<'_> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let start = self.start.wrapping_add(rows.start * self.stride);
        MatrixMut { start, rows: rows.len(), cols: self.cols, stride: self.stride, elements: PhantomData }
    }

    /// Row `i`.
    ///
    /// # Panics
    /// If there is none.
    pub(crate) fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row's elements are borrowed uniquely for longer than `self` is here, by the invariant of `start`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.stride), self.cols) }
    }

    /// Makes this matrix `a · b`.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub(crate) fn set_product(&mut self, a: Matrix<'_>, b: Matrix<'_>, threads: Threads) {
        self.product(a, b, false, threads);
    }

    /// Adds `a · b` to this matrix.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub(crate) fn add_product(&mut self, a: Matrix<'_>, b: Matrix<'_>, threads: Threads) {
        self.product(a, b, true, threads);
    }

    fn product(&mut self, a: Matrix<'_>, b: Matrix<'_>, add: bool, threads: Threads) {
        assert_eq!([self.rows, self.cols], [a.rows, b.cols], "the shape of a product");
        // SAFETY: `self` has these elements for itself, by the invariant of `start`, and they are initialised.
        unsafe { multiply(self.start, self.stride, a, b, add, threads) }
    }
}

/// Makes `out` the rows of `a · b`, one after another, in its memory where that suffices.
///
/// # Panics
/// If the shapes do not fit.
pub(crate) fn product_into(out: &mut Vec<f32>, a: Matrix<'_>, b: Matrix<'_>, threads: Threads) {
    let count = a.rows.checked_mul(b.cols).expect("a product that fits memory");
    out.clear();
    out.reserve_exact(count);
    // SAFETY: `out` has room for all rows, and nothing is read of it. Every element is written, so that all are initialised after the call.
    unsafe {
        multiply(out.as_mut_ptr(), b.cols, a, b, false, threads);
        out.set_len(count);
    }
}

/// `a · b` with `row` added to each of its rows, one after another.
///
/// # Panics
/// If the shapes do not fit.
pub(crate) fn product_plus_row(a: Matrix<'_>, b: Matrix<'_>, row: &[f32]) -> Vec<f32> {
    assert_eq!(row.len(), b.cols, "what is added to each row of a product");
    let count = a.rows.checked_mul(b.cols).expect("a product that fits memory");
    let mut out = Vec::with_capacity(count);
    fill(&mut out.spare_capacity_mut()[..count], |place| repeat(place, row));
    // SAFETY: `fill` has seen to it that these elements, which are in the vector's capacity, are initialised.
    unsafe { out.set_len(count) }
    MatrixMut::new(&mut out, a.rows, b.cols).add_product(a, b, Threads::Pool);
    out
}

/// Writes the rows of `a · b`, one after another.
///
/// # Panics
/// If the shapes do not fit.
fn write<'a>(out: &'a mut [MaybeUninit<f32>], a: Matrix<'_>, b: Matrix<'_>) -> &'a mut [f32] {
    assert_eq!(Some(out.len()), a.rows.checked_mul(b.cols), "the shape of a product");
    // SAFETY: `out` has these elements for itself, and nothing is read of them. Every one is written, so that all are initialised after the
    // call.
    unsafe {
        multiply(out.as_mut_ptr().cast(), b.cols, a, b, false, Threads::Pool);
        out.assume_init_mut()
    }
}

/// Fills `out` with copies of `row`.
///
/// # Panics
/// Where `out` is not a number of rows.
fn repeat<'a>(out: &'a mut [MaybeUninit<f32>], row: &[f32]) -> &'a mut [f32] {
    /// Elements of a task.
    const TASK: usize = 1 << 15;
    let len = row.len().max(1);
    assert!(out.len().is_multiple_of(len), "{} elements in rows of {len}", out.len());
    out.par_chunks_mut((TASK / len).max(1) * len).for_each(|rows| {
        for place in rows.chunks_exact_mut(len) {
            place.write_copy_of_slice(row);
        }
    });
    // SAFETY: the tasks are a whole number of rows each, which together are `out`, and each row was written. Where `row` is empty, so
    // is `out`: nobody writes to rows of one element then, or the copy has panicked.
    unsafe { out.assume_init_mut() }
}

/// A vector in parts, each of which is zero until something is added to it. None is filled with zeros for that: what comes first is
/// written over what was in the memory.
#[derive(Debug)]
pub(crate) struct PartSums {
    /// The parts lie behind its elements, in its capacity.
    values: Vec<f32>,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    /// Counted from the first part's start.
    range: Range<usize>,
    /// Whether all of it is initialised.
    written: bool,
}

impl PartSums {
    /// Parts of these lengths behind the elements of `values`.
    pub(crate) fn behind(mut values: Vec<f32>, lengths: impl Iterator<Item = usize>) -> Self {
        let (parts, len) = parts(lengths, false);
        values.reserve_exact(len);
        PartSums { values, parts }
    }

    /// Parts of these lengths that begin with the elements of `values`.
    ///
    /// # Panics
    /// Where `values` is not as long.
    pub(crate) fn of(mut values: Vec<f32>, lengths: impl Iterator<Item = usize>) -> Self {
        let (parts, len) = parts(lengths, true);
        assert_eq!(values.len(), len, "elements of parts");
        // They stay initialised in the vector's capacity.
        values.clear();
        PartSums { values, parts }
    }

    /// Adds `a · b`, row by row.
    ///
    /// # Panics
    /// Where there is no such part, or it is not as long.
    pub(crate) fn add_product(&mut self, part: usize, a: Matrix<'_>, b: Matrix<'_>) {
        self.with(
            part,
            |sum| MatrixMut::new(sum, a.rows, b.cols).add_product(a, b, Threads::Pool),
            |place| write(place, a, b),
        );
    }

    /// Adds `values`.
    ///
    /// # Panics
    /// As [`add_product`](Self::add_product).
    pub(crate) fn add(&mut self, part: usize, values: &[f32]) {
        let add = |sum: &mut [f32]| {
            assert_eq!(sum.len(), values.len(), "what is added to part {part}");
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        };
        self.with(part, add, |place| place.write_copy_of_slice(values));
    }

    /// Has `work` add to a part, which has been filled with zeros where nothing had been added to it.
    ///
    /// # Panics
    /// Where there is no such part.
    pub(crate) fn add_by(&mut self, part: usize, work: impl FnOnce(&mut [f32])) {
        self.with(part, |_| (), zero);
        self.with(part, work, zero);
    }

    /// What was given, and the parts behind it; `None` where nothing was added to a part.
    pub(crate) fn finish(self) -> Option<Vec<f32>> {
        let PartSums { mut values, parts } = self;
        let len = parts.last().map_or(0, |part| part.range.end);
        if !parts.iter().all(|part| part.written) {
            return None;
        }
        // SAFETY: the parts are `len` elements without gaps behind the vector's and in its capacity, and all of them are written.
        unsafe { values.set_len(values.len() + len) }
        Some(values)
    }

    fn with(
        &mut self,
        part: usize,
        written: impl FnOnce(&mut [f32]),
        unwritten: impl FnOnce(&mut [MaybeUninit<f32>]) -> &mut [f32],
    ) {
        let part = &mut self.parts[part];
        let place = &mut self.values.spare_capacity_mut()[part.range.clone()];
        if part.written {
            // SAFETY: a part is marked as written once all of it is initialised.
            return written(unsafe { place.assume_init_mut() });
        }
        fill(place, unwritten);
        part.written = true;
    }
}

/// Parts of these lengths, one after another, and their length together.
fn parts(lengths: impl Iterator<Item = usize>, written: bool) -> (Vec<Part>, usize) {
    let mut end = 0;
    let part = |len: usize| {
        let start = end;
        end += len;
        Part { range: start..end, written }
    };
    let parts = lengths.map(part).collect();
    (parts, end)
}

fn zero(out: &mut [MaybeUninit<f32>]) -> &mut [f32] {
    out.iter_mut().for_each(|place| {
        place.write(0.0);
    });
    // SAFETY: every element has just been written.
    unsafe { out.assume_init_mut() }
}

/// Has `fill` write to all of `place`, which it returns as proof.
///
/// # Panics
/// Where it returns other memory.
fn fill(place: &mut [MaybeUninit<f32>], fill: impl FnOnce(&mut [MaybeUninit<f32>]) -> &mut [f32]) {
    let (start, count) = (place.as_ptr().cast::<f32>(), place.len());
    let written = fill(place);
    assert!(written.as_ptr() == start && written.len() == count, "other memory was written than what was to be");
}

/// Writes `a · b`, or adds it where `add`, to rows of `b.cols` elements that begin `stride` elements after one another.
///
/// # Safety
/// Those elements must be writable, not be accessed by others meanwhile, and, where `add`, be initialised.
unsafe fn multiply(out: *mut f32, stride: usize, a: Matrix<'_>, b: Matrix<'_>, add: bool, threads: Threads) {
    assert_eq!(a.cols, b.rows, "the inner size of a product");
    let worthwhile = a.rows >= PANEL_ROWS && a.cols >= PANEL_INNER && b.cols >= PANEL;
    if worthwhile && b.row_stride == 1 && b.col_stride > 1 {
        // SAFETY: as the caller promises.
        return unsafe { multiply_by_panels(out, stride, a, b, add, threads) };
    }
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::Pool => Parallelism::Rayon(0),
    };
    // SAFETY: as the caller promises.
    unsafe { multiply_whole(out, stride, a, b, add, parallelism) }
}

/// Columns of a panel of the second factor; the last one has the rest as well.
const PANEL: usize = 64;

/// Rows of the first factor from which a copy of the second one pays.
const PANEL_ROWS: usize = 16;

/// Inner sizes from which it pays.
const PANEL_INNER: usize = 128;

/// Elements between two columns of a panel, beyond their length: a line of the cache. Without it columns of 1,024 elements, or of multiples
/// of that, would all lie in the same few lines.
const PANEL_GAP: usize = 16;

/// `multiply` where each column of `b` lies in one piece: panels of some columns are copied to where they lie close together, and multiplied
/// one by one, each by one thread. `gemm` itself reads such a factor with steps of a column's length, at a third to four fifths of the speed.
/// The bits are the same: the sum of an element is formed in the same order.
///
/// # Safety
/// As for `multiply`.
unsafe fn multiply_by_panels(out: *mut f32, stride: usize, a: Matrix<'_>, b: Matrix<'_>, add: bool, threads: Threads) {
    thread_local! {
        /// A panel. It stays, so that its pages need not be mapped again for the next one.
        static PLACE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let out = Shared(out);
    let step = b.rows + PANEL_GAP;
    let panels = b.cols / PANEL;
    let panel = |i: usize| {
        let start = i * PANEL;
        let count = if i + 1 == panels { b.cols - start } else { PANEL };
        PLACE.with_borrow_mut(|place| {
            if place.len() < count * step {
                place.resize(count * step, 0.0);
            }
            for (column, j) in place.chunks_mut(step).zip(start..start + count) {
                column[..b.rows].copy_from_slice(&b.values[j * b.col_stride..][..b.rows]);
            }
            let copied = Matrix::strided(place, count, b.rows, step).transposed();
            // SAFETY: the panels are columns of the result that no other panel has; otherwise as the caller promises.
            unsafe { multiply_whole(out.start().add(start), stride, a, copied, add, Parallelism::None) }
        });
    };
    match threads {
        Threads::One => (0..panels).for_each(panel),
        Threads::Pool => (0..panels).into_par_iter().for_each(panel),
    }
}

/// Memory to which several threads write, each to elements of its own.
#[derive(Clone, Copy)]
struct Shared(*mut f32);

impl Shared {
    fn start(self) -> *mut f32 {
        self.0
    }
}

// SAFETY: whoever writes through it says which elements are whose.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// `multiply` as one call of `gemm`.
///
/// # Safety
/// As for `multiply`.
unsafe fn multiply_whole(
    out: *mut f32,
    stride: usize,
    a: Matrix<'_>,
    b: Matrix<'_>,
    add: bool,
    parallelism: Parallelism,
) {
    let step = |stride: usize| stride as isize;
    // SAFETY: the factors' elements are in their slices, which `check` has seen, and those of the result are as the caller promises. Strides
    // are at most the length of a slice, so they fit. Where `add` is false nothing is read of the result.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            out,
            1,
            step(stride),
            add,
            a.values.as_ptr(),
            step(a.col_stride),
            step(a.row_stride),
            b.values.as_ptr(),
            step(b.col_stride),
            step(b.row_stride),
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// # Panics
/// If a matrix of these sizes does not lie in `len` elements.
fn check(len: usize, rows: usize, cols: usize, stride: usize) {
    let end = if rows == 0 || cols == 0 {
        Some(0)
    } else {
        (rows - 1).checked_mul(stride).and_then(|start| start.checked_add(cols))
    };
    assert!(end.is_some_and(|end| end <= len), "a matrix of {rows} × {cols}, rows every {stride}, in {len} elements");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, salt: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + salt * 104_729) % 4001) as f32 / 1000.25 - 2.0).collect()
    }

    fn expected(a: Matrix<'_>, b: Matrix<'_>, i: usize, j: usize) -> f64 {
        let at = |m: Matrix<'_>, i: usize, j: usize| f64::from(m.values[i * m.row_stride + j * m.col_stride]);
        (0..a.cols).map(|k| at(a, i, k) * at(b, k, j)).sum()
    }

    #[test]
    fn products_are_those_of_the_definition() {
        for [m, n, k] in
            [[1, 1, 1], [1, 70, 33], [70, 1, 5], [3, 5, 0], [65, 130, 2], [64, 64, 64], [131, 67, 700], [16, 200, 128]]
        {
            let (left, right) = (values(m * k, 1), values(n * k, 2));
            for (a, b) in [
                (Matrix::new(&left, m, k), Matrix::new(&right, k, n)),
                (Matrix::new(&left, k, m).transposed(), Matrix::new(&right, k, n)),
                (Matrix::new(&left, m, k), Matrix::new(&right, n, k).transposed()),
            ] {
                let mut whole = vec![9.0; 3];
                product_into(&mut whole, a, b, Threads::Pool);
                let stride = n + 3;
                let mut gaps = vec![0.5; m * stride];
                let mut out = MatrixMut::strided(&mut gaps, m, n, stride);
                out.set_product(a, b, Threads::One);
                out.add_product(a, b, Threads::One);
                assert_eq!(whole.len(), m * n);
                for (i, row) in gaps.chunks(stride).enumerate() {
                    for j in 0..n {
                        let expected = expected(a, b, i, j);
                        let bound = 1e-6 * 4.0 * k as f64;
                        assert!((f64::from(whole[i * n + j]) - expected).abs() <= bound, "{m} {n} {k}: {i} {j}");
                        assert!((f64::from(row[j]) - 2.0 * expected).abs() <= 2.0 * bound, "{m} {n} {k}: {i} {j}");
                    }
                    assert_eq!(row[n..], [0.5; 3], "what lies between rows is not written");
                }
            }
        }
    }

    #[test]
    fn groups_of_columns_are_written_apart() {
        let mut whole = vec![0.0; 3 * 6];
        let groups: Vec<MatrixMut<'_>> = MatrixMut::new(&mut whole, 3, 6).column_groups(2).collect();
        std::thread::scope(|scope| {
            for (group, mut columns) in groups.into_iter().enumerate() {
                scope.spawn(move || {
                    for i in 0..3 {
                        columns.row(i).fill((group * 10 + i) as f32);
                    }
                    columns.rows(1..3).row(1)[0] = -1.0;
                });
            }
        });
        let expected: [f32; 18] =
            [0.0, 0.0, 10.0, 10.0, 20.0, 20.0, 1.0, 1.0, 11.0, 11.0, 21.0, 21.0, -1.0, 2.0, -1.0, 12.0, -1.0, 22.0];
        assert_eq!(whole, expected);
    }

    #[test]
    fn matrices_lie_in_their_memory() {
        let values = vec![0.0; 11];
        let fits = |rows, cols, stride| std::panic::catch_unwind(|| check(values.len(), rows, cols, stride)).is_ok();
        assert!(fits(3, 3, 4) && fits(11, 1, 1) && fits(0, 100, 100) && fits(2, 0, 100));
        assert!(!fits(3, 4, 4) && !fits(12, 1, 1) && !fits(usize::MAX, 3, 4) && !fits(2, usize::MAX, 1));
        let matrix = Matrix::strided(&values, 3, 3, 4);
        assert!(std::panic::catch_unwind(|| matrix.rows(2..4)).is_err());
        assert!(std::panic::catch_unwind(|| matrix.row(3)).is_err());
    }

    #[test]
    fn a_row_is_added_to_each_row_of_a_product() {
        for [m, n, k] in [[1, 1, 1], [3, 5, 0], [300, 7, 20], [40, 1000, 600]] {
            let (left, right, row) = (values(m * k, 1), values(k * n, 2), values(n, 3));
            let (a, b) = (Matrix::new(&left, m, k), Matrix::new(&right, k, n));
            let out = product_plus_row(a, b, &row);
            assert_eq!(out.len(), m * n);
            for (index, found) in out.into_iter().enumerate() {
                let expected = expected(a, b, index / n, index % n) + f64::from(row[index % n]);
                assert!((f64::from(found) - expected).abs() <= 1e-6 * (4.0 * k as f64 + 2.0), "{m} {n} {k}: {index}");
            }
        }
        assert!(product_plus_row(Matrix::new(&[], 0, 3), Matrix::new(&values(6, 1), 3, 2), &[1.0, 2.0]).is_empty());
    }

    #[test]
    fn no_bit_depends_on_the_number_of_threads() {
        // Beyond the size from which threads share a product.
        for [m, k, n] in [[300, 1100, 260], [1024, 130, 100], [70, 3000, 70]] {
            let (a, b, row) = (values(m * k, 4), values(k * n, 5), values(n, 6));
            let run = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
                    product_plus_row(a, b, &row).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                })
            };
            let one = run(1);
            assert!([2, 3, 8].into_iter().all(|threads| run(threads) == one), "{m} {k} {n}");
        }
    }

    #[test]
    fn panels_give_the_bits_of_the_whole_product() {
        for [m, k, n] in [[16, 128, 65], [33, 1024, 130], [256, 300, 64], [40, 200, 255]] {
            let (left, right) = (values(m * k, 4), values(n * k, 5));
            let (a, b) = (Matrix::new(&left, m, k), Matrix::new(&right, n, k).transposed());
            for threads in [Threads::One, Threads::Pool] {
                let mut panels = Vec::new();
                product_into(&mut panels, a, b, threads);
                let mut whole = vec![9.0; m * n];
                // SAFETY: the vector has an element for each of the product, and is borrowed here alone.
                unsafe { multiply_whole(whole.as_mut_ptr(), n, a, b, false, Parallelism::None) };
                assert!(panels.iter().zip(&whole).all(|(x, y)| x.to_bits() == y.to_bits()), "{m} {k} {n}");
            }
        }
    }

    #[test]
    fn sums_of_parts_need_no_zeros_and_come_in_any_order() {
        let (a, b) = (values(12, 7), values(20, 8));
        let (left, right) = (Matrix::new(&a, 3, 4), Matrix::new(&b, 4, 5));
        let mut once = Vec::new();
        product_into(&mut once, left, right, Threads::One);
        let twice: Vec<f32> = once.iter().map(|x| x + x).collect();
        let lengths = || [2, 15, 0, 3].into_iter();
        let expected = [vec![9.0, 3.0, 4.0], twice, vec![1.0, 1.0, 0.0]].concat();
        let add_all = |mut sums: PartSums| {
            sums.add_product(1, left, right);
            sums.add_by(3, |part| part[0] += 1.0);
            sums.add(0, &[1.0, 2.0]);
            sums.add(2, &[]);
            sums
        };
        let mut sums = add_all(PartSums::behind(vec![9.0], lengths()));
        sums.add_product(1, left, right);
        sums.add(0, &[2.0, 2.0]);
        sums.add_by(3, |part| part[1] = 1.0);
        assert_eq!(sums.finish().unwrap(), expected);
        // Onto what is there already.
        let before = [vec![2.0, 2.0], once, vec![0.0, 1.0, 0.0]].concat();
        assert_eq!(add_all(PartSums::of(before, lengths())).finish().unwrap(), expected[1..]);
        let mut unfinished = PartSums::behind(Vec::new(), lengths());
        unfinished.add(0, &[1.0, 2.0]);
        assert_eq!(unfinished.finish(), None);
    }
}
