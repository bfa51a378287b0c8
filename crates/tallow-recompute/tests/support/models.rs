//! The models. B batch · T tokens · D model · V vocabulary · C channels

use super::{Model, piece, state::dropout, tensor, var};
use candle_core::{D, Device, Result, Tensor, Var};

fn affine(x: &Tensor, w: &Var, b: &Var) -> Result<Tensor> {
    x.matmul(w)?.broadcast_add(b)
}

/// Layers of these widths; the loss is the mean square.
pub(crate) fn mlp(n_rows: usize, widths: &[usize]) -> Model {
    let (mut pieces, mut params) = (Vec::new(), Vec::new());
    for (i, pair) in widths.windows(2).enumerate() {
        let seed = 10 * i as u64;
        let (w, b) = (var(seed, &[pair[0], pair[1]]), var(seed + 1, &[pair[1]]));
        params.push((format!("{i}.w"), w.clone()));
        params.push((format!("{i}.b"), b.clone()));
        let is_last = i + 2 == widths.len();
        pieces.push((
            format!("layer.{i}"),
            piece(move |x| {
                let y = affine(x, &w, &b)?;
                if is_last { y.sqr()?.mean_all() } else { y.tanh()? + y.relu()? }
            }),
        ));
    }
    Model { pieces, params, x: tensor(99, &[n_rows, widths[0]]) }
}

/// Convolutions, relu, and a view between them and the head.
pub(crate) fn conv() -> Model {
    let kernels = [var(1, &[4, 2, 3, 3]), var(2, &[4, 4, 3, 3]), var(3, &[2, 4, 3, 3])];
    let head = var(4, &[2 * 6 * 5, 3]);
    let mut params: Vec<_> =
        kernels.iter().enumerate().map(|(i, k)| (format!("conv.{i}"), k.clone())).collect();
    params.push(("head".to_string(), head.clone()));
    let mut pieces = Vec::new();
    for (i, kernel) in kernels.into_iter().enumerate() {
        pieces.push((format!("conv.{i}"), piece(move |x| x.conv2d(&kernel, 1, 1, 1, 1)?.relu())));
    }
    pieces.push(("flatten".to_string(), piece(|x| x.flatten_from(1))));
    pieces.push(("head".to_string(), piece(move |x| x.matmul(&head)?.sqr()?.mean_all())));
    Model { pieces, params, x: tensor(98, &[2, 2, 6, 5]) }
}

fn softmax(x: &Tensor) -> Result<Tensor> {
    let e = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}

/// Attention and a wide layer with dropout after each, `[B, T, D]`.
fn block(x: &Tensor, w: &[Var]) -> Result<Tensor> {
    let (b, t, d) = x.dims3()?;
    let project = |x: &Tensor, w: &Var| x.reshape((b * t, ()))?.matmul(w)?.reshape((b, t, ()));
    let (q, k, v) = (project(x, &w[0])?, project(x, &w[1])?, project(x, &w[2])?);
    let scores = (q.matmul(&k.t()?)? / (d as f64).sqrt())?;
    let x = (x + dropout(&softmax(&scores)?.matmul(&v)?)?)?;
    let wide = project(&x, &w[3])?.tanh()?;
    &x + dropout(&project(&wide, &w[4])?)?
}

/// Token ids `[B, T]` through an embedding, blocks and a head to the mean loss; with `tied`, the
/// head is the embedding.
pub(crate) fn gpt(n_blocks: usize, tied: bool) -> Model {
    let (n_vocab, d) = (11, 8);
    let embedding = var(1, &[n_vocab, d]);
    let mut params = vec![("embedding".to_string(), embedding.clone())];
    let mut pieces = vec![(
        "embedding".to_string(),
        piece({
            let table = embedding.clone();
            move |ids| {
                let (b, t) = ids.dims2()?;
                dropout(&table.index_select(&ids.flatten_all()?, 0)?.reshape((b, t, ()))?)
            }
        }),
    )];
    for i in 0..n_blocks {
        let shapes = [[d, d], [d, d], [d, d], [d, 4 * d], [4 * d, d]];
        let w: Vec<Var> =
            shapes.iter().enumerate().map(|(j, s)| var(100 * i as u64 + j as u64 + 7, s)).collect();
        params.extend(w.iter().enumerate().map(|(j, w)| (format!("block.{i}.{j}"), w.clone())));
        pieces.push((format!("block.{i}"), piece(move |x| block(x, &w))));
    }
    let head = if tied { embedding } else { var(2, &[n_vocab, d]) };
    if !tied {
        params.push(("head".to_string(), head.clone()));
    }
    pieces.push((
        "head".to_string(),
        piece(move |x| {
            let logits = x.flatten_to(1)?.matmul(&head.t()?)?;
            let targets = Tensor::arange(0u32, logits.dim(0)? as u32, x.device())?.unsqueeze(1)?;
            softmax(&logits)?.log()?.gather(&targets, 1)?.mean_all()?.neg()
        }),
    ));
    // Some ids repeat.
    let ids: Vec<u32> = (0..10).map(|i| i * i % 7).collect();
    let x = Tensor::from_vec(ids, (2, 5), &Device::Cpu).expect("ten ids");
    Model { pieces, params, x }
}
