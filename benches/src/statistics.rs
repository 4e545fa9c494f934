//! Statistics over rounds.

use serde::Serialize;

/// The median of samples and their spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    /// The 50th percentile.
    pub(super) median: f64,
    /// The 10th percentile.
    pub(super) p10: f64,
    /// The 90th percentile.
    pub(super) p90: f64,
    pub(super) samples: usize,
}

impl Summary {
    /// Summarizes samples; `None` without samples.
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

/// Returns a quantile of sorted samples by linear interpolation.
fn quantile(sorted: &[f64], fraction: f64) -> Option<f64> {
    let position = fraction * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    Some(below + (above - below) * position.fract())
}

/// Fits a power law to points with positive coordinates and returns its exponent; 1 is linear growth.
pub(super) fn growth(points: &[(f64, f64)]) -> Option<f64> {
    let logarithms: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let count = logarithms.len() as f64;
    let (sum_x, sum_y) = logarithms.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
    let (mean_x, mean_y) = (sum_x / count, sum_y / count);
    let (mut variance, mut covariance) = (0.0, 0.0);
    for (x, y) in &logarithms {
        variance += (x - mean_x) * (x - mean_x);
        covariance += (x - mean_x) * (y - mean_y);
    }
    (variance > 0.0).then(|| covariance / variance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_has_median_and_percentiles() {
        let summary = Summary::of((0..=100).rev().map(f64::from).collect()).expect("samples exist");
        assert_eq!(summary, Summary { median: 50.0, p10: 10.0, p90: 90.0, samples: 101 });
        let two = Summary::of(vec![4.0, 2.0]).expect("samples exist");
        assert_eq!(two.median, 3.0);
        assert_eq!(Summary::of(Vec::new()), None);
    }

    #[test]
    fn growth_returns_the_exponent() {
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
