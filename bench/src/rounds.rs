//! Cells in rounds, so that a busy moment of the machine hits all of them.

use rig::BenchError;
use rig::lines::Lines;
use rig::progress::bar;
use rig::signal::Signals;
use serde::Serialize;

/// Measures every cell once a round; each round begins with another one. A row is in `file` as soon as it is known.
///
/// # Errors
/// Those of `measure`, and that a signal came.
pub(crate) fn in_rounds<C: Clone, R: Serialize>(
    (cells, rounds): (&[C], usize),
    signals: &Signals,
    file: &mut Lines,
    name: impl Fn(&C) -> String,
    measure: impl Fn(usize, &C) -> Result<R, BenchError>,
) -> Result<Vec<R>, BenchError> {
    let mut cells = cells.to_vec();
    let mut rows = Vec::with_capacity(cells.len() * rounds);
    let bar = bar(cells.len() * rounds);
    for round in 1..=rounds {
        for cell in &cells {
            signals.check()?;
            bar.set_message(format!("round {round}: {}", name(cell)));
            let row = measure(round, cell)?;
            file.write(&row)?;
            rows.push(row);
            bar.inc(1);
        }
        cells.rotate_left(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_begins_with_another_cell_and_its_rows_are_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let mut file = Lines::create(&path).unwrap();
        let measure = |round, cell: &char| Ok((round, *cell));
        let rows = in_rounds((&['a', 'b'], 2), &Signals::default(), &mut file, char::to_string, measure).unwrap();
        assert_eq!(rows, [(1, 'a'), (1, 'b'), (2, 'b'), (2, 'a')]);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 4);
    }
}
