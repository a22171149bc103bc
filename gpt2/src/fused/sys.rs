//! Products of matrices by the crate `gemm`, behind types that say where the elements lie.

use std::marker::PhantomData;
use std::ops::Range;

use gemm::Parallelism;

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

/// Writes `a · b`, or adds it where `add`, to rows of `b.cols` elements that begin `stride` elements after one another.
///
/// # Safety
/// Those elements must be writable, not be accessed by others meanwhile, and, where `add`, be initialised.
unsafe fn multiply(out: *mut f32, stride: usize, a: Matrix<'_>, b: Matrix<'_>, add: bool, threads: Threads) {
    assert_eq!(a.cols, b.rows, "the inner size of a product");
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::Pool => Parallelism::Rayon(0),
    };
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
        for [m, n, k] in [[1, 1, 1], [1, 70, 33], [70, 1, 5], [3, 5, 0], [65, 130, 2], [64, 64, 64], [131, 67, 700]] {
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
}
