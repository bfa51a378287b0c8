//! Charts as SVG, whose colours are classes of the page's style sheet.

use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;
/// Points of a line; of more, each stretch keeps its extremes.
const MOST_POINTS: usize = 600;
const N_TICKS: f64 = 5.0;

/// What a chart is of.
pub(super) struct Axes {
    /// Below the chart.
    pub(super) x_name: &'static str,
    /// What lies on the horizontal axis at least: charts of one run begin and end alike.
    pub(super) xs: (f64, f64),
    /// Whether 0 is on the vertical axis whatever the values.
    pub(super) from_zero: bool,
}

/// One line.
pub(super) struct Line {
    /// In the legend.
    pub(super) name: String,
    /// Place among the colours.
    pub(super) colour: usize,
    pub(super) points: Vec<(f64, f64)>,
    /// Whether points are marked, where they are few.
    pub(super) has_dots: bool,
}

/// Where numbers come to lie.
struct Frame {
    x: (f64, f64),
    y: (f64, f64),
}

impl Frame {
    /// Around `points`, and from the first to the last of `xs` at least.
    fn of(
        points: impl Iterator<Item = (f64, f64)>,
        xs: (f64, f64),
        from_zero: bool,
    ) -> Option<Self> {
        let all: Vec<(f64, f64)> = points.filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
        let (_, first_y) = *all.first()?;
        let grow = |(low, high): (f64, f64), v: f64| (low.min(v), high.max(v));
        let x = all.iter().fold(xs, |range, p| grow(range, p.0));
        let mut y = all.iter().fold((first_y, first_y), |range, p| grow(range, p.1));
        if from_zero {
            y = grow(y, 0.0);
        }
        let wide = |(low, high): (f64, f64)| match high > low {
            true => (low, high),
            false => (low - low.abs().max(1.0) / 2.0, high + high.abs().max(1.0) / 2.0),
        };
        let (y, x) = (wide(y), wide(x));
        let above = (y.1 - y.0) / 20.0;
        let below = if from_zero && y.0 == 0.0 { 0.0 } else { above };
        Some(Self { x, y: (y.0 - below, y.1 + above) })
    }

    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let share = |v: f64, (low, high): (f64, f64)| (v - low) / (high - low);
        (
            LEFT + share(x, self.x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - share(y, self.y) * (HEIGHT - TOP - BOTTOM),
        )
    }

    fn path(&self, points: &[(f64, f64)]) -> String {
        let mut path = String::new();
        for (i, point) in points.iter().enumerate() {
            let (x, y) = self.at(*point);
            let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" });
        }
        path
    }

    /// Grid, numbers and the name of the horizontal axis.
    fn axes(&self, x_name: &str) -> String {
        let mut svg = String::new();
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for y in ticks(self.y) {
            let (_, at) = self.at((self.x.0, y));
            let _ = write!(
                svg,
                "<line class=grid x1={LEFT} x2={right} y1={at:.1} y2={at:.1} />\
                 <text class=y x={} y={:.1}>{}</text>",
                LEFT - 8.0,
                at + 4.0,
                number(y)
            );
        }
        for x in ticks(self.x) {
            let (at, _) = self.at((x, self.y.0));
            let _ = write!(svg, "<text class=x x={at:.1} y={}>{}</text>", bottom + 18.0, number(x));
        }
        let middle = (LEFT + right) / 2.0;
        let _ = write!(svg, "<text class=x x={middle} y={}>{x_name}</text>", HEIGHT - 6.0);
        svg
    }
}

/// Round numbers within a range.
fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let rough = (high - low) / N_TICKS;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|k| k * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(power);
    let first = (low / step).ceil();
    let n = ((high / step).floor() - first).max(0.0) as usize;
    (0..=n).map(|i| (first + i as f64) * step).collect()
}

/// As short as it can be told from its neighbours.
fn number(x: f64) -> String {
    match x.abs() {
        0.0 => "0".to_string(),
        1e-3..1e6 => format!("{}", (x * 1e6).round() / 1e6),
        _ => format!("{x:.3e}").parse::<f64>().map_or(String::new(), |x| format!("{x:e}")),
    }
}

/// Of each of so many stretches, the points that stand out; the order stays.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MOST_POINTS {
        return points.to_vec();
    }
    let stretch = points.len().div_ceil(MOST_POINTS / 2);
    let extremes = |part: &[(f64, f64)]| {
        let by = |a: &(usize, &(f64, f64)), b: &(usize, &(f64, f64))| a.1.1.total_cmp(&b.1.1);
        let low = part.iter().enumerate().min_by(by).map_or(0, |(i, _)| i);
        let high = part.iter().enumerate().max_by(by).map_or(0, |(i, _)| i);
        [part[low.min(high)], part[low.max(high)]]
    };
    points.chunks(stretch).flat_map(extremes).collect()
}

/// Whatever lines there are, with `marks` on the horizontal axis; nothing if no line has a point.
pub(super) fn lines(axes: &Axes, lines: &[Line], marks: &[f64]) -> String {
    let all = lines.iter().flat_map(|line| line.points.iter().copied());
    let Some(frame) = Frame::of(all, axes.xs, axes.from_zero) else { return String::new() };
    let mut svg = frame.axes(axes.x_name);
    for &mark in marks {
        let (x, y) = frame.at((mark, frame.y.0));
        let _ = write!(svg, "<line class=mark x1={x:.1} x2={x:.1} y1={y:.1} y2={:.1} />", y - 10.0);
    }
    for line in lines {
        let points: Vec<_> = line.points.iter().copied().filter(|p| p.1.is_finite()).collect();
        let points = thinned(&points);
        let _ =
            write!(svg, "<path class=\"line c{}\" d=\"{}\" />", line.colour, frame.path(&points));
        for point in points.iter().filter(|_| line.has_dots) {
            let (x, y) = frame.at(*point);
            let _ = write!(svg, "<circle class=c{} cx={x:.1} cy={y:.1} r=3 />", line.colour);
        }
    }
    let shown = lines.iter().filter(|line| !line.points.is_empty());
    let mut names: Vec<(String, String)> =
        shown.map(|line| (format!("c{}", line.colour), line.name.clone())).collect();
    if !marks.is_empty() {
        names.push(("mark".to_string(), "not applied".to_string()));
    }
    figure(&svg, &names)
}

/// A limit so many times above what is drawn would press that flat: it is named, not drawn.
const FAR_ABOVE: f64 = 4.0;

/// Layers on each other over `xs`, and a line across at `limit`.
pub(super) fn stacked(
    x_name: &str,
    xs: &[f64],
    layers: &[(String, Vec<f64>)],
    limit: Option<f64>,
) -> String {
    let sums = (0..xs.len()).map(|i| (xs[i], layers.iter().map(|layer| layer.1[i]).sum()));
    let highest = sums.clone().map(|(_, sum): (f64, f64)| sum).fold(0.0, f64::max);
    let drawn = limit.filter(|limit| *limit <= FAR_ABOVE * highest);
    let (Some(&first), Some(&last)) = (xs.first(), xs.last()) else { return String::new() };
    let top = drawn.map(|limit| (first, limit));
    let Some(frame) = Frame::of(sums.chain(top), (first, last), true) else {
        return String::new();
    };
    let mut svg = frame.axes(x_name);
    let mut below = vec![0.0; xs.len()];
    let mut names = Vec::new();
    for (colour, (name, heights)) in layers.iter().enumerate() {
        if heights.iter().all(|height| *height == 0.0) {
            continue;
        }
        let above: Vec<f64> = below.iter().zip(heights).map(|(low, height)| low + height).collect();
        let top = xs.iter().copied().zip(above.iter().copied());
        let bottom = xs.iter().copied().zip(below.iter().copied()).rev();
        let path = frame.path(&top.chain(bottom).collect::<Vec<_>>());
        let _ = write!(svg, "<path class=\"area c{colour}\" d=\"{path}Z\" />");
        names.push((format!("c{colour}"), name.clone()));
        below = above;
    }
    if let Some(limit) = drawn {
        let path = frame.path(&[(frame.x.0, limit), (frame.x.1, limit)]);
        let _ = write!(svg, "<path class=\"line limit\" d=\"{path}\" />");
        names.push(("limit".to_string(), "budget".to_string()));
    } else if let Some(limit) = limit {
        names.push(("limit".to_string(), format!("budget, far above: {limit:.0}")));
    }
    figure(&svg, &names)
}

fn figure(svg: &str, names: &[(String, String)]) -> String {
    let entry = |(class, name): &(String, String)| {
        format!("<span><i class={class}></i>{}</span>", super::escaped(name))
    };
    let legend: String = names.iter().map(entry).collect();
    format!(
        "<div class=legend>{legend}</div>\
         <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=img>{svg}</svg>"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within() {
        for range in [(0.0, 1.0), (-3.0, 7.0), (1e-4, 9e-4), (0.0, 123_456.0), (2.29, 2.31)] {
            let ticks = ticks(range);
            assert!((3..=8).contains(&ticks.len()), "{range:?}: {ticks:?}");
            assert!(
                ticks.iter().all(|t| *t >= range.0 - 1e-12 && *t <= range.1 + 1e-9),
                "{ticks:?}"
            );
        }
        assert_eq!(ticks((0.0, 10.0)), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(
            [number(0.0005), number(20.0), number(6.5e7)],
            ["5e-4", "20", "6.5e7"].map(str::to_string)
        );
    }

    #[test]
    fn thinning_keeps_what_stands_out() {
        let mut points: Vec<(f64, f64)> = (0..10_000).map(|i| (f64::from(i), 1.0)).collect();
        points[7777].1 = 9.0;
        points[1234].1 = -9.0;
        let thin = thinned(&points);
        assert!(thin.len() <= MOST_POINTS + 2, "{}", thin.len());
        assert!(thin.contains(&(7777.0, 9.0)) && thin.contains(&(1234.0, -9.0)));
        assert!(thin.windows(2).all(|pair| pair[0].0 <= pair[1].0));
    }

    /// What is held fills the chart, whatever the budget.
    #[test]
    fn a_limit_far_above_is_named() {
        let of = |limit| {
            let layers = [("weights".to_string(), vec![2.0, 3.0])];
            stacked("seconds", &[0.0, 1.0], &layers, Some(limit))
        };
        assert!(of(10.0).contains("line limit") && of(10.0).contains(">budget<"));
        assert!(!of(1000.0).contains("line limit"));
        assert!(of(1000.0).contains(">budget, far above: 1000<"));
    }

    #[test]
    fn one_point_and_none_are_drawn() {
        let axes = Axes { x_name: "update", xs: (1.0, 9.0), from_zero: false };
        let line = |points| Line { name: "loss".into(), colour: 0, points, has_dots: true };
        assert_eq!(lines(&axes, &[line(Vec::new())], &[]), "");
        let svg = lines(&axes, &[line(vec![(3.0, 2.5), (4.0, f64::NAN)])], &[3.0]);
        assert!(svg.contains("<circle") && !svg.contains("NaN"), "{svg}");
        // A quarter of the way.
        let x = LEFT + (WIDTH - LEFT - RIGHT) / 4.0;
        assert!(svg.contains(&format!("cx={x:.1} ")), "{svg}");
    }
}
