//! No bytes make the reader panic, and whatever it accepts is whole.
mod common;
use common::{Draw, gzip, idx, mutate};
use std::path::Path;
use tallow_data::idx::{IdxBytes, parse_u8};

const N_MUTANTS: u64 = 20_000;

fn accepted(content: &[u8]) -> Option<IdxBytes<'_>> {
    match parse_u8(Path::new("mutant"), content, 3) {
        Ok(array) => {
            assert_eq!(array.dims.iter().product::<usize>(), array.bytes.len());
            Some(array)
        }
        Err(error) => {
            assert!(error.to_string().starts_with("`mutant`: "), "{error}");
            None
        }
    }
}

fn base() -> Vec<u8> {
    let bytes: Vec<u8> = (0..5 * 6 * 7).map(|i| (i * i % 251) as u8).collect();
    idx(&[5, 6, 7], &bytes)
}

#[test]
fn plain_mutants() {
    let (base, mut draw) = (base(), Draw(1));
    let n_accepted =
        (0..N_MUTANTS).filter(|_| accepted(&mutate(&base, &mut draw)).is_some()).count();
    // Changed pixels are as good as any: the mutants are not all refused at the first byte.
    assert!(n_accepted > 1000 && n_accepted < N_MUTANTS as usize, "{n_accepted}");
}

#[test]
fn gzip_mutants() {
    let (base, mut draw) = (base(), Draw(2));
    let compressed = gzip(&base);
    let want = accepted(&compressed).unwrap().bytes.into_owned();
    for _ in 0..N_MUTANTS {
        let mutant = mutate(&compressed, &mut draw);
        // The checksum: what is accepted is what was written, unless the mutation un-zipped it.
        if let (Some(array), true) = (accepted(&mutant), mutant.starts_with(&[0x1f, 0x8b])) {
            assert_eq!(*array.bytes, want);
        }
    }
}

#[test]
fn mutants_compressed_afterwards() {
    let (base, mut draw) = (base(), Draw(3));
    for _ in 0..N_MUTANTS / 2 {
        let mutant = mutate(&base, &mut draw);
        let plain = accepted(&mutant).map(|array| array.bytes.into_owned());
        let zipped = gzip(&mutant);
        assert_eq!(accepted(&zipped).map(|array| array.bytes.into_owned()), plain);
    }
}

#[test]
fn every_cut() {
    for content in [base(), gzip(&base())] {
        assert!((0..content.len()).all(|end| accepted(&content[..end]).is_none()));
    }
}
