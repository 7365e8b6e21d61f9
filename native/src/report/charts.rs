//! The charts of a report, as SVG.

use ebbtide::compile::{Breakdown, Category};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::Bar;

const WIDTH: u32 = 960;
const INK: RGBColor = RGBColor(27, 39, 51);
const GRID: RGBColor = RGBColor(223, 229, 234);
const RED: RGBColor = RGBColor(200, 40, 40);

/// A colour for each category, in the order of [`Category::ALL`].
const COLOURS: [RGBColor; 11] = [
    RGBColor(31, 119, 180),
    RGBColor(120, 180, 220),
    RGBColor(44, 160, 44),
    RGBColor(150, 210, 130),
    RGBColor(148, 103, 189),
    RGBColor(127, 127, 127),
    RGBColor(255, 127, 14),
    RGBColor(255, 187, 120),
    RGBColor(23, 190, 207),
    RGBColor(158, 218, 229),
    RGBColor(188, 189, 34),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// A chart, or in its place the words that there is none.
fn draw(height: u32, body: impl FnOnce(&Area<'_>) -> Drawn) -> String {
    let mut svg = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        body(&area).and_then(|()| Ok(area.present()?))
    };
    match drawn {
        Ok(()) => svg,
        Err(error) => format!("<p>No chart: {}</p>", super::text(&error.to_string())),
    }
}

/// Lowest and highest, a little apart.
fn range(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values
        .filter(|v| v.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    match low <= high {
        true => low - (high - low).max(1e-6) * 0.05..high + (high - low).max(1e-6) * 0.05,
        false => 0.0..1.0,
    }
}

/// Losses of training and validation over steps.
pub fn loss(train: &[(f64, f64)], valid: &[(u64, f64)]) -> String {
    let valid: Vec<(f64, f64)> = valid.iter().map(|(step, loss)| (*step as f64, *loss)).collect();
    let both = || train.iter().chain(&valid);
    let (x, y) = (range(both().map(|p| p.0)), range(both().map(|p| p.1)));
    draw(320, |area| {
        let mut chart =
            ChartBuilder::on(area).margin(10).x_label_area_size(30).y_label_area_size(50).build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .axis_style(INK)
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .draw()?;
        let finite = |points: &[(f64, f64)]| points.iter().copied().filter(|p| p.1.is_finite()).collect::<Vec<_>>();
        chart
            .draw_series(LineSeries::new(finite(train), COLOURS[0].stroke_width(2)))?
            .label("training")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], COLOURS[0].stroke_width(2)));
        chart
            .draw_series(LineSeries::new(finite(&valid), COLOURS[6].stroke_width(2)).point_size(3))?
            .label("validation")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], COLOURS[6].stroke_width(2)));
        chart.configure_series_labels().border_style(GRID).background_style(WHITE).draw()?;
        Ok(())
    })
}

/// Occupied bytes by category over time, one upon the other, with what is allocated and the budget.
pub fn memory(occupied: &[(f64, Breakdown)], allocated: u64, budget: u64) -> String {
    const MIB: f64 = 1048576.0;
    let times = range(occupied.iter().map(|(t, _)| *t));
    let top = allocated.max(budget) as f64 / MIB * 1.08;
    // A resident run's budget may be far above its peak: then the line would flatten everything else.
    let top = if budget > allocated * 4 { allocated as f64 / MIB * 1.2 } else { top };
    draw(420, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(30)
            .y_label_area_size(60)
            .build_cartesian_2d(times.clone(), 0.0..top)?;
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc("seconds")
            .y_desc("MiB")
            .axis_style(INK)
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .draw()?;
        let mut below: Vec<f64> = vec![0.0; occupied.len()];
        for (category, colour) in Category::ALL.into_iter().zip(COLOURS) {
            if occupied.iter().all(|(_, b)| b.get(category) == 0) {
                continue;
            }
            let (mut upper, mut lower) = (Vec::new(), Vec::new());
            for ((i, (t, bytes)), base) in occupied.iter().enumerate().zip(&mut below) {
                let height = *base + bytes.get(category) as f64 / MIB;
                // Steps, not slopes: content appears and goes at one action.
                if let (Some(h), Some(b)) =
                    (upper.last().map(|p: &(f64, f64)| p.1), lower.last().map(|p: &(f64, f64)| p.1))
                    && i > 0
                {
                    upper.push((*t, h));
                    lower.push((*t, b));
                }
                upper.push((*t, height));
                lower.push((*t, *base));
                *base = height;
            }
            upper.extend(lower.into_iter().rev());
            chart
                .draw_series(std::iter::once(Polygon::new(upper, colour.filled())))?
                .label(category.name())
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled()));
        }
        for (name, bytes, colour) in [("allocated", allocated, INK), ("budget", budget, RED)] {
            let y = bytes as f64 / MIB;
            if y > top {
                continue;
            }
            chart
                .draw_series(DashedLineSeries::new([(times.start, y), (times.end, y)], 6, 4, colour.stroke_width(2)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        chart.configure_series_labels().border_style(GRID).background_style(WHITE.mix(0.85)).draw()?;
        Ok(())
    })
}

/// Where each segment was in device memory.
pub fn timeline(segments: &[String], bars: &[Bar]) -> String {
    let times = range(bars.iter().flat_map(|b| [b.from, b.to]));
    let rows = segments.len().max(1);
    let height = (60 + 16 * rows as u32).clamp(160, 1600);
    draw(height, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(30)
            .y_label_area_size(80)
            .build_cartesian_2d(times, (rows as f64)..0.0)?;
        let name = |y: &f64| segments.get(*y as usize).filter(|_| y.fract() == 0.0).cloned().unwrap_or_default();
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc("seconds").axis_style(INK).light_line_style(TRANSPARENT).bold_line_style(GRID);
        mesh.y_labels(rows.min(60)).y_label_formatter(&name).draw()?;
        chart.draw_series(bars.iter().map(|b| {
            let y = b.segment as f64;
            Rectangle::new([(b.from, y + 0.15), (b.to, y + 0.85)], COLOURS[0].filled())
        }))?;
        Ok(())
    })
}
