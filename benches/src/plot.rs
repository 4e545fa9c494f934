//! The report as an SVG plot: ratios with their spread and targets, and times as a function of a count.

use std::fmt::Write as _;

use crate::line::{Line, Target};
use crate::report::Report;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 420.0;
const RIGHT: f64 = 40.0;
const LINE_HEIGHT: f64 = 24.0;
const GROWTH_HEIGHT: f64 = 320.0;

/// Returns the report as SVG.
pub(super) fn svg(report: &Report) -> String {
    let ratios: Vec<&Line> = report.lines.iter().filter(|line| line.ratio.is_some()).collect();
    let growth: Vec<&Line> = report.lines.iter().filter(|line| !line.points.is_empty()).collect();
    let ratios_height = if ratios.is_empty() { 0.0 } else { LINE_HEIGHT * (ratios.len() as f64 + 3.0) };
    let height = 40.0 + ratios_height + GROWTH_HEIGHT * growth.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let machine = &report.machine;
    let title = format!("{} on {}, {}, {}", machine.backend, machine.processor, machine.commit, machine.date);
    text(&mut svg, (12.0, 24.0), "start", &title);
    if !ratios.is_empty() {
        draw_ratios(&mut svg, 40.0, &ratios);
    }
    for (index, line) in growth.iter().enumerate() {
        draw_growth(&mut svg, 40.0 + ratios_height + GROWTH_HEIGHT * index as f64, line);
    }
    svg.push_str("</svg>\n");
    svg
}

/// A logarithmic axis.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// Creates an axis from the power of ten below the smallest value to the power of ten above the largest one.
    fn around(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) = values
            .filter(|value| *value > 0.0)
            .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low.is_finite() { (low, high) } else { (1.0, 1.0) };
        let low = 10_f64.powf(low.log10().floor());
        let high = 10_f64.powf(high.log10().ceil());
        Self { low, high: if high > low { high } else { low * 10.0 }, from, to }
    }

    fn place(&self, value: f64) -> f64 {
        let part = (value.max(self.low) / self.low).ln() / (self.high / self.low).ln();
        self.from + part * (self.to - self.from)
    }

    fn powers(&self) -> impl Iterator<Item = f64> + use<> {
        let (low, high) = (self.low.log10().round() as i32, self.high.log10().round() as i32);
        (low..=high).map(|power| 10_f64.powi(power))
    }
}

fn draw_ratios(svg: &mut String, top: f64, lines: &[&Line]) {
    let values = lines.iter().filter_map(|line| line.ratio).flat_map(|ratio| [ratio.p10, ratio.p90]);
    let axis = Axis::around(values.chain([1.0]), LEFT, WIDTH - RIGHT);
    let bottom = top + LINE_HEIGHT * (lines.len() as f64 + 1.0);
    text(svg, (LEFT, top + 12.0), "start", "ours divided by raw: median, p10 to p90; the mark is the target");
    for power in axis.powers() {
        let x = axis.place(power);
        stroke(svg, (x, top + LINE_HEIGHT), (x, bottom), "#ccc", 1.0);
        text(svg, (x, bottom + 16.0), "middle", &format!("{power}"));
    }
    for (index, line) in lines.iter().enumerate() {
        let Some(ratio) = line.ratio else { continue };
        let y = top + LINE_HEIGHT * (index as f64 + 1.5);
        let colour = match line.reached {
            Some(true) => "#1a7f37",
            Some(false) => "#cf222e",
            None => "#57606a",
        };
        text(svg, (LEFT - 8.0, y + 4.0), "end", &format!("{}: {}", line.row, line.case));
        stroke(svg, (axis.place(ratio.p10), y), (axis.place(ratio.p90), y), colour, 3.0);
        dot(svg, (axis.place(ratio.median), y), colour);
        if let Target::Times { most: target, plus: 0.0 } | Target::Speed { least: target } = line.target {
            let x = axis.place(target);
            stroke(svg, (x, y - 8.0), (x, y + 8.0), "#0969da", 2.0);
        }
    }
}

fn draw_growth(svg: &mut String, top: f64, line: &Line) {
    let (upper, lower) = (top + 40.0, top + GROWTH_HEIGHT - 40.0);
    let seconds: Vec<(f64, f64)> = line.points.iter().map(|(count, time)| (*count, time / 1e9)).collect();
    let x = Axis::around(seconds.iter().map(|point| point.0), LEFT / 4.0, WIDTH - RIGHT);
    let y = Axis::around(seconds.iter().map(|point| point.1), lower, upper);
    let exponent = line.ours.map_or_else(String::new, |ours| format!(", exponent {:.2}", ours.median));
    text(svg, (LEFT / 4.0, top + 24.0), "start", &format!("{}: {}{exponent}", line.row, line.case));
    for power in x.powers() {
        stroke(svg, (x.place(power), upper), (x.place(power), lower), "#ccc", 1.0);
        text(svg, (x.place(power), lower + 16.0), "middle", &format!("{power} leases"));
    }
    for power in y.powers() {
        stroke(svg, (x.from, y.place(power)), (x.to, y.place(power)), "#ccc", 1.0);
        text(svg, (x.from - 6.0, y.place(power) + 4.0), "end", &format!("{power} s"));
    }
    // Linear growth through the last point, for comparison.
    if let Some(last) = seconds.last() {
        let at = |count: f64| (x.place(count), y.place(last.1 * count / last.0));
        let first = seconds.iter().map(|point| point.0).fold(last.0, f64::min);
        stroke(svg, at(first), at(last.0), "#0969da", 1.0);
    }
    for (count, time) in &seconds {
        dot(svg, (x.place(*count), y.place(*time)), "#1a7f37");
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    // Writing into a string cannot fail.
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{escaped}</text>");
}

fn stroke(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str, width: f64) {
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" \
         stroke-width=\"{width}\"/>"
    );
}

fn dot(svg: &mut String, (x, y): (f64, f64), colour: &str) {
    let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_covers_values_between_powers_of_ten() {
        let axis = Axis::around([0.5, 30.0].into_iter(), 0.0, 300.0);
        assert_eq!((axis.low, axis.high), (0.1, 100.0));
        assert_eq!((axis.place(0.1), axis.place(1.0).round(), axis.place(100.0)), (0.0, 100.0, 300.0));
        let one = Axis::around([1.0].into_iter(), 0.0, 10.0);
        assert!(one.place(1.0).is_finite() && one.high > one.low);
    }
}
