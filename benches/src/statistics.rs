//! What many rounds come to.

use serde::Serialize;

/// The middle of some samples, and how far they spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    /// Half of the samples are below it.
    pub(super) median: f64,
    /// A tenth of the samples is below it.
    pub(super) p10: f64,
    /// A tenth of the samples is above it.
    pub(super) p90: f64,
    pub(super) samples: usize,
}

impl Summary {
    /// `None` without samples.
    pub(super) fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_unstable_by(f64::total_cmp);
        Some(Self {
            median: quantile(&samples, 0.5)?,
            p10: quantile(&samples, 0.1)?,
            p90: quantile(&samples, 0.9)?,
            samples: samples.len(),
        })
    }
}

/// Of sorted samples, between the two that are nearest.
fn quantile(sorted: &[f64], part: f64) -> Option<f64> {
    let place = part * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(below + (above - below) * place.fract())
}

/// The exponent of the power law that fits the points best: 1 where `y` grows as `x` does. Both above 0.
pub(super) fn growth(points: &[(f64, f64)]) -> Option<f64> {
    let logarithms: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let count = logarithms.len() as f64;
    let (sum_x, sum_y) = logarithms.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
    let (mean_x, mean_y) = (sum_x / count, sum_y / count);
    let (mut along, mut across) = (0.0, 0.0);
    for (x, y) in &logarithms {
        along += (x - mean_x) * (x - mean_x);
        across += (x - mean_x) * (y - mean_y);
    }
    (along > 0.0).then(|| across / along)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_tenths_of_samples_in_any_order() {
        let summary = Summary::of((0..=100).rev().map(f64::from).collect()).expect("there are samples");
        assert_eq!(summary, Summary { median: 50.0, p10: 10.0, p90: 90.0, samples: 101 });
        let two = Summary::of(vec![4.0, 2.0]).expect("there are samples");
        assert_eq!(two.median, 3.0);
        assert_eq!(Summary::of(Vec::new()), None);
    }

    #[test]
    fn growth_tells_a_line_from_a_square() {
        let points = |power: i32| [1.0, 2.0, 4.0, 8.0].map(|x: f64| (x, 3.0 * x.powi(power)));
        let close = |found: Option<f64>, expected: f64| {
            assert!(
                found.is_some_and(|found| (found - expected).abs() < 1e-9),
                "{found:?} is not {expected}"
            );
        };
        close(growth(&points(1)), 1.0);
        close(growth(&points(2)), 2.0);
        assert_eq!(growth(&[(1.0, 1.0)]), None, "one point has no slope");
    }
}
