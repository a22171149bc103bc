//! What slower and farther links do.

use super::charts::{by_strategy, each_group, titled, varies};
use super::digest::{Case, Digest, distinct};
use super::html::Page;
use super::links::Traits;
use crate::plot::{Labels, Point, Scale, curves};
use crate::record::Axis;
use crate::stats::Interval;

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    if !digest.axes.contains(&Axis::Link) || digest.cases.iter().all(|case| case.step.is_none()) {
        return;
    }
    page.section("curves", "Links", "Latency and bandwidth");
    page.small(
        "Links differ in more than one thing, so that a curve over one of them shows the others, too. Rates are those of the links' \
         descriptions; round trips are the smallest that connections saw.",
    );
    let known = |cases: &[&Case<'_>], pick: fn(&Traits) -> Option<f64>| {
        distinct(cases.iter().filter_map(|case| pick(&case.traits))).len() > 1
    };
    let wanted = |cases: &[&Case<'_>]| {
        varies(cases, Axis::Link) && (known(cases, |traits| traits.rate) || known(cases, |traits| traits.rtt))
    };
    let drawn = each_group(page, digest.groups(&[Axis::Strategy, Axis::Link]), wanted, |page, label, cases| {
        if known(cases, |traits| traits.rate) {
            let title = titled("Step time over the link's rate", label);
            let labels = Labels { title: &title, x: "rate (Mbit/s)", y: "milliseconds a step" };
            chart(page, &labels, cases, |traits| traits.rate, |case| case.step);
        }
        if known(cases, |traits| traits.rtt) {
            let title = titled("Exposed time over the round trip", label);
            let labels = Labels { title: &title, x: "round trip (ms)", y: "milliseconds of exposed communication" };
            chart(page, &labels, cases, |traits| traits.rtt, |case| case.exposed);
        }
    });
    if !drawn {
        page.text("Of fewer than two links a rate or a round trip is known, so there is no curve to draw.");
    }
}

fn chart(
    page: &mut Page,
    labels: &Labels<'_>,
    cases: &[&Case<'_>],
    x: fn(&Traits) -> Option<f64>,
    y: fn(&Case<'_>) -> Option<Interval>,
) {
    let point = |case: &Case<'_>| {
        let Interval { estimate, low, high, .. } = y(case)?;
        Some(Point { x: x(&case.traits)?, y: estimate, interval: Some((low, high)) })
    };
    let scale = Scale { log_x: true, log_y: true, ..Scale::default() };
    page.figure(labels.title, curves(labels, &by_strategy(cases, point), scale), "Both axes logarithmic.");
}
