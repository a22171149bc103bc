//! `--tune`: which algorithm is fastest at which size, and the rules that say so.

use comm_core::{Algorithm, OpKind};

use super::case::ResultPlacement;
use super::report::Row;

/// An algorithm must be this much faster than the one that was best at the size before to take over: less is noise.
const MARGIN: f64 = 0.97;

/// Times of one size, in any unit.
#[derive(Clone, Debug)]
struct Point {
    size: usize,
    times: Vec<(Algorithm, f64)>,
}

/// Of `rows`, each measured with an algorithm of its own: a table for each transport, and rules in the form of
/// `comm_core::table`, for each transport and for all of them together.
pub(crate) fn report(rows: &[Row]) -> String {
    let mut lines = Vec::new();
    let mut series: Vec<&Row> = Vec::new();
    for row in rows.iter().filter(|row| row.algorithm.is_some()) {
        if !series.iter().any(|other| is_same(other, row)) {
            series.push(row);
        }
    }
    for first in series {
        let Some(kind) = OpKind::ALL.into_iter().find(|kind| kind.to_string() == first.operation.name()) else {
            continue;
        };
        let of: Vec<&Row> = rows.iter().filter(|row| is_same(first, row)).collect();
        let mut all: Vec<Vec<Point>> = Vec::new();
        for transport in distinct(of.iter().map(|row| row.transport.as_str())) {
            let points = points(of.iter().copied().filter(|row| row.transport == transport));
            lines.push(format!(
                "#\n# {kind} of {} on {} ranks over {transport}: time (us), * the least",
                first.dtype, first.ranks
            ));
            lines.extend(table(&points));
            lines.push(format!("# rules for {transport}:"));
            lines.extend(rules(&points).into_iter().map(|rule| rule.text(kind, first.ranks)));
            all.push(points);
        }
        if all.len() > 1 {
            lines.push("#\n# rules for all transports together (geometric mean of time / least time):".into());
            lines.extend(rules(&together(&all)).into_iter().map(|rule| rule.text(kind, first.ranks)));
        }
    }
    lines.join("\n")
}

/// Whether two rows differ in size, transport and algorithm alone.
fn is_same(a: &Row, b: &Row) -> bool {
    a.operation == b.operation && a.dtype == b.dtype && a.redop == b.redop
}

fn points<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<Point> {
    let mut points: Vec<Point> = Vec::new();
    for row in rows {
        let (Some(algorithm), Some(figures)) = (row.algorithm, row.outcome(ResultPlacement::InPlace).figures()) else {
            continue;
        };
        let time = (algorithm, figures.time_us);
        match points.iter_mut().find(|point| point.size == row.size) {
            Some(point) => point.times.push(time),
            None => points.push(Point { size: row.size, times: vec![time] }),
        }
    }
    points
}

/// One point for each size: how much slower than the best each algorithm is, over all transports.
fn together(all: &[Vec<Point>]) -> Vec<Point> {
    let Some(first) = all.first() else { return Vec::new() };
    first
        .iter()
        .map(|point| {
            let same: Vec<&Point> =
                all.iter().filter_map(|points| points.iter().find(|other| other.size == point.size)).collect();
            let mean = |algorithm: Algorithm| {
                let logs: Option<Vec<f64>> =
                    same.iter().map(|point| Some((point.time(algorithm)? / point.best()?.1).ln())).collect();
                let logs = logs?;
                Some((algorithm, (logs.iter().sum::<f64>() / logs.len() as f64).exp()))
            };
            Point {
                size: point.size,
                times: point.times.iter().filter_map(|(algorithm, _)| mean(*algorithm)).collect(),
            }
        })
        .collect()
}

fn table(points: &[Point]) -> Vec<String> {
    let algorithms = distinct(points.iter().flat_map(|point| point.times.iter().map(|(algorithm, _)| *algorithm)));
    let titles: String = algorithms.iter().map(|algorithm| format!(" {:>20}", algorithm.name())).collect();
    let mut lines = vec![format!("# {:>12}{titles}", "size (B)")];
    for point in points {
        let best = point.best().map(|(algorithm, _)| algorithm);
        let cells: String = algorithms
            .iter()
            .map(|algorithm| {
                let mark = if best == Some(*algorithm) { "*" } else { "" };
                let time = point.time(*algorithm).map_or("N/A".into(), |time| format!("{mark}{time:.2}"));
                format!(" {time:>20}")
            })
            .collect();
        lines.push(format!("  {:>12}{cells}", point.size));
    }
    lines
}

impl Point {
    fn best(&self) -> Option<(Algorithm, f64)> {
        self.times.iter().copied().min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    fn time(&self, algorithm: Algorithm) -> Option<f64> {
        self.times.iter().find(|(other, _)| *other == algorithm).map(|(_, time)| *time)
    }
}

/// Up to so many bytes this algorithm; any number for the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    bytes: Option<usize>,
    algorithm: Algorithm,
}

impl Rule {
    fn text(self, kind: OpKind, ranks: usize) -> String {
        let bytes = match self.bytes {
            None => "ANY".into(),
            Some(bytes) if bytes.is_multiple_of(1 << 20) => format!("{} << 20", bytes >> 20),
            Some(bytes) if bytes.is_multiple_of(1 << 10) => format!("{} << 10", bytes >> 10),
            Some(bytes) => bytes.to_string(),
        };
        format!("    rule(OpKind::{kind:?}, {ranks}, {bytes}, Algorithm::{:?}),", self.algorithm)
    }
}

/// The best algorithm from each size on; one that is hardly better than its predecessor does not replace it.
fn rules(points: &[Point]) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    for point in points {
        let Some((best, time)) = point.best() else { continue };
        match rules.last_mut() {
            Some(last)
                if last.algorithm == best || point.time(last.algorithm).is_some_and(|old| time > MARGIN * old) =>
            {
                last.bytes = Some(point.size);
            }
            _ => rules.push(Rule { bytes: Some(point.size), algorithm: best }),
        }
    }
    if let Some(last) = rules.last_mut() {
        last.bytes = None;
    }
    rules
}

fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(size: usize, direct: f64, ring: f64) -> Point {
        Point { size, times: vec![(Algorithm::Direct, direct), (Algorithm::Ring, ring)] }
    }

    #[test]
    fn rules_follow_the_crossover_and_not_the_noise() {
        let points = [
            point(1 << 10, 1.0, 5.0),
            point(4 << 10, 2.0, 1.99),
            point(16 << 10, 4.0, 5.0),
            point(64 << 10, 40.0, 20.0),
            point(256 << 10, 80.0, 81.0),
        ];
        let expected = [
            Rule { bytes: Some(16 << 10), algorithm: Algorithm::Direct },
            Rule { bytes: None, algorithm: Algorithm::Ring },
        ];
        assert_eq!(rules(&points), expected);
        assert_eq!(
            expected[0].text(OpKind::AllReduce, 2),
            "    rule(OpKind::AllReduce, 2, 16 << 10, Algorithm::Direct),"
        );
        assert_eq!(expected[1].text(OpKind::Broadcast, 4), "    rule(OpKind::Broadcast, 4, ANY, Algorithm::Ring),");
        assert!(rules(&[]).is_empty());
    }

    #[test]
    fn transports_weigh_alike() {
        // Twice as slow on one and twice as fast on the other, however long it takes there, is a draw.
        let slow = vec![point(8, 1000.0, 2000.0)];
        let fast = vec![point(8, 2.0, 1.0)];
        let both = together(&[slow, fast]);
        assert!((both[0].times[0].1 - both[0].times[1].1).abs() < 1e-9, "{both:?}");
    }
}
