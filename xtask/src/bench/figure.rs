//! Figures: one axis of a workload against what it takes.

use super::fit::Law;
use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;
use std::{fs, path::Path};

/// Pixels.
const SIZE: (u32, u32) = (640, 400);
const COLOURS: [RGBColor; 4] =
    [RGBColor(31, 119, 180), RGBColor(214, 96, 20), RGBColor(44, 140, 60), RGBColor(140, 60, 160)];

/// A name, points, and the law they follow.
pub(super) type Line = (String, Vec<(f64, f64)>, Option<Law>);

/// What is drawn.
pub(super) struct Figure<'a> {
    pub(super) title: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
    pub(super) lines: &'a [Line],
}

impl Figure<'_> {
    /// Writes it as SVG; points are dots, a law is a line.
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn save(&self, path: &Path) -> Result<()> {
        let folder = path.parent().context("a figure needs a folder")?;
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        // The library's errors hold borrowed state.
        self.drawn(path).map_err(|error| anyhow!("{}: {error}", path.display()))
    }

    fn drawn(&self, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
        let points = || self.lines.iter().flat_map(|(_, points, _)| points);
        let most = |f: fn(&(f64, f64)) -> f64| points().map(f).fold(0.0, f64::max) * 1.05;
        let root = SVGBackend::new(path, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(self.title, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..most(|p| p.0), 0.0..most(|p| p.1))?;
        chart.configure_mesh().max_light_lines(1).x_desc(self.x).y_desc(self.y).draw()?;
        for (i, (name, points, law)) in self.lines.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let dots = points.iter().map(|&point| Circle::new(point, 4, colour.filled()));
            chart
                .draw_series(dots)?
                .label(name)
                .legend(move |at| Circle::new(at, 4, colour.filled()));
            if let Some(law) = law {
                let last = points.iter().map(|p| p.0).fold(0.0, f64::max);
                let curve = (0..=100).map(|i| last * f64::from(i) / 100.0).map(|x| (x, law.at(x)));
                chart.draw_series(LineSeries::new(curve, colour))?;
            }
        }
        chart.configure_series_labels().border_style(BLACK).background_style(WHITE).draw()?;
        root.present()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_its_points_and_words() {
        let path = std::env::temp_dir().join(format!("xtask-figure-{}", std::process::id()));
        let path = path.join("a.svg");
        let points = vec![(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)];
        let law = Law::of(&points);
        let lines = [("plain".to_string(), points, law)];
        let figure = Figure { title: "peak", x: "batch", y: "MiB", lines: &lines };
        figure.save(&path).expect("the folder can be written");
        let text = fs::read_to_string(&path).expect("it was written");
        for words in ["<svg", "peak", "batch", "MiB", "plain", "polyline"] {
            assert!(text.contains(words), "{words}");
        }
        // Three points and one in the legend.
        assert_eq!(text.matches("<circle").count(), 4);
        fs::remove_dir_all(path.parent().expect("a folder")).expect("it is ours");
    }
}
