//! The one public measurement of DiLoCo's compute utilisation by bandwidth, beside what is measured here.
//!
//! Source: github.com/Adnan082/diloco-measured, raw records of its utilisation grid: 30.8 million parameters, 4 L40S GPUs, TCP, means of 3 runs.

use rig::plot::{Curve, Labels, Point, Scale, curves};
use rig::stats::median;

use super::super::html::{Page, Table};
use super::super::text::{figure, maybe};
use super::{Bandwidth, Networked};

/// Rates in Mbit/s.
const RATES: [f64; 4] = [50.0, 200.0, 1000.0, 5000.0];

/// Steps between two synchronisations, and compute utilisation in percent at each rate.
const UTILISATION: [(u64, [f64; 4]); 4] = [
    (1, [0.07, 0.32, 1.74, 7.79]),
    (8, [0.53, 2.47, 12.24, 39.76]),
    (32, [2.34, 9.73, 35.66, 67.66]),
    (128, [11.30, 35.01, 70.82, 86.32]),
];

const PARAMETERS: f64 = 30.8e6;
const RANKS: f64 = 4.0;

/// Bits of f32 that a rank sends for one average around a ring.
const BITS: f64 = 2.0 * (RANKS - 1.0) / RANKS * PARAMETERS * 32.0;

/// One of its points.
struct Measured {
    every: u64,
    rate: f64,
    /// Seconds of sending at the link's rate for each second of computing.
    load: f64,
    utilisation: f64,
}

/// Seconds that a step computes there: what the run that synchronises in every step has at the fastest rate, where it is measured best.
fn compute() -> f64 {
    let (rate, utilisation) = (RATES[3] * 1e6, UTILISATION[0].1[3] / 100.0);
    BITS / rate * utilisation / (1.0 - utilisation)
}

fn points() -> Vec<Measured> {
    let of = |(every, shares): (u64, [f64; 4])| {
        RATES.into_iter().zip(shares).map(move |(rate, share)| Measured {
            every,
            rate,
            load: BITS / (rate * 1e6) / every as f64 / compute(),
            utilisation: share / 100.0,
        })
    };
    UTILISATION.into_iter().flat_map(of).collect()
}

/// What is computed of the time where sending takes its link's rate, and nothing hides behind the computing.
fn at_best(load: f64) -> f64 {
    1.0 / (1.0 + load)
}

/// What is reached of that, in the median.
fn reached(points: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    median(&points.map(|(load, utilisation)| utilisation / at_best(load)).collect::<Vec<_>>())
}

/// Ours of one strategy over near links.
fn ours<'b, 'd, 'a>(
    bandwidth: &'b Bandwidth<'d, 'a>,
    name: &'b str,
    transport: &'b str,
) -> impl Iterator<Item = (f64, &'b Networked<'d, 'a>)> {
    let is =
        move |cell: &&Networked<'_, '_>| cell.name == name && cell.case.cell.transport == transport && cell.is_near();
    bandwidth.cells.iter().filter(is).filter_map(|cell| Some((cell.load?, cell)))
}

/// How close both come to what their links allow.
pub(super) fn sentence(bandwidth: &Bandwidth<'_, '_>) -> Option<String> {
    let shares = bandwidth.transports().into_iter().filter_map(|transport| {
        let points = ours(bandwidth, "diloco", transport).map(|(load, cell)| (load, cell.utilisation));
        Some(format!("{:.0} % over {transport}", 100.0 * reached(points)?))
    });
    let shares: Vec<String> = shares.collect();
    let theirs = reached(points().iter().map(|point| (point.load, point.utilisation)))?;
    (!shares.is_empty()).then(|| {
        format!(
            "If sending took exactly as long as the link's rate allows, a certain share of the time would be left to compute. Of that share \
             diloco reaches here {} (median over near links); in the public measurement of DiLoCo (diloco-measured, 30.8 M parameters, 4 GPUs) it \
             is {:.0} %.",
            shares.join(" and "),
            100.0 * theirs
        )
    })
}

pub(super) fn write(page: &mut Page, bandwidth: &Bandwidth<'_, '_>) {
    let names = ["ddp", "diloco"];
    if names.iter().all(|name| bandwidth.cells.iter().all(|cell| cell.name != *name)) {
        return;
    }
    page.topic("public", "Beside the public measurement of DiLoCo");
    page.text(
        "github.com/Adnan082/diloco-measured has such a curve, measured over real sockets: 30.8 M parameters on 4 L40S GPUs over shaped TCP, \
         synchronised every 1, 8, 32 or 128 steps. It has no FSDP, no parameter servers, no QUIC, no delay, no loss of packets, no count of \
         bytes, and no target loss; all of these are in the tables above, of a smaller model on a CPU.",
    );
    page.small(&format!(
        "So that models and machines of different speed fit into one picture, x is the time that sending takes at the link's rate, divided by the \
         time that computing takes. For this page, bytes and computing time were measured. For the public records, the bytes are taken to be those \
         of a ring of f32 ({} MB a synchronisation), and the computing time of a step ({} ms) follows from the run that synchronises in every step \
         at 5 Gbit/s. If only the rate of the link mattered, and no communication were hidden, 1/(1+x) of the time would be computed.",
        figure(BITS / 8e6),
        figure(1e3 * compute())
    ));
    page.figure("Share of the time that is computed, by load", picture(bandwidth, &names), "Both axes logarithmic.");
    let mut table = Table::new(&["who", "link", "x", "computed", "by 1/(1+x)"], 2);
    let percent = |share: f64| format!("{} %", figure(100.0 * share));
    for point in points() {
        table.row(vec![
            format!("public, every {} steps", point.every),
            format!("{} Mbit/s", figure(point.rate)),
            figure(point.load),
            percent(point.utilisation),
            percent(at_best(point.load)),
        ]);
    }
    for transport in bandwidth.transports() {
        for name in names {
            for (load, cell) in ours(bandwidth, name, transport) {
                table.row(vec![
                    format!("here, {name} over {transport}"),
                    format!("{} Mbit/s", maybe(cell.case.traits.rate)),
                    figure(load),
                    percent(cell.utilisation),
                    percent(at_best(load)),
                ]);
            }
        }
    }
    page.folded_table("The same as a table", &table);
}

fn picture(bandwidth: &Bandwidth<'_, '_>, names: &[&str]) -> Result<String, String> {
    let line = |name: String, mut points: Vec<(f64, f64)>, colour: usize, dashed: bool| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let point = |(x, share): (f64, f64)| Point { x, y: 100.0 * share, interval: None };
        let points = points.into_iter().map(point).collect();
        Curve { name, points, colour, dashed, width: 2.0, mark: Some(colour) }
    };
    let mut lines: Vec<Curve> = Vec::new();
    for transport in bandwidth.transports() {
        for name in names {
            let points = ours(bandwidth, name, transport).map(|(load, cell)| (load, cell.utilisation)).collect();
            lines.push(line(format!("{name} over {transport}"), points, lines.len() + 1, false));
        }
    }
    let theirs = points();
    for (every, _) in UTILISATION {
        let of = theirs.iter().filter(|point| point.every == every).map(|point| (point.load, point.utilisation));
        lines.push(line(format!("public, every {every}"), of.collect(), lines.len() + 1, true));
    }
    let all = lines.iter().flat_map(|line| &line.points).map(|point| point.x).filter(|x| *x > 0.0);
    let (low, high) = all.fold((f64::INFINITY, 0.0_f64), |(low, high), x| (low.min(x), high.max(x)));
    if high > low {
        let steps = 40;
        let at = |step: i32| low * (high / low).powf(f64::from(step) / f64::from(steps));
        let ideal = (0..=steps).map(|step| (at(step), at_best(at(step)))).collect();
        lines.push(Curve { mark: None, width: 1.0, ..line("1/(1+x)".into(), ideal, 0, true) });
    }
    let labels = Labels {
        title: "Share of the time that is computed, by load",
        x: "seconds of sending for each second of computing",
        y: "share of the time (%)",
    };
    curves(&labels, &lines, Scale { log_x: true, log_y: true, ..Scale::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_step_computes_there_is_the_same_by_all_runs_that_synchronise_in_every_step() {
        // 184.8 MB a synchronisation.
        assert!((BITS / 8e6 - 184.8).abs() < 1e-9);
        for (rate, share) in RATES.into_iter().zip(UTILISATION[0].1) {
            let by_this = BITS / (rate * 1e6) * share / (100.0 - share);
            // The slowest is told with one digit.
            assert!((by_this / compute() - 1.0).abs() < 0.18, "{rate}: {by_this}");
        }
    }

    #[test]
    fn the_public_points_lie_near_what_their_links_allow() {
        let points = points();
        assert_eq!(points.len(), 16);
        let shares: Vec<f64> = points.iter().map(|point| point.utilisation / at_best(point.load)).collect();
        assert!(shares.iter().all(|share| (0.7..1.35).contains(share)), "{shares:?}");
        assert_eq!(reached([(1.0, 0.5), (3.0, 0.125), (0.0, 1.0)].into_iter()), Some(1.0));
    }
}
