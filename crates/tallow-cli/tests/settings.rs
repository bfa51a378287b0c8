//! Every refusal of an argument or of a setting: its message, and its exit code. None reads data or trains.

mod refusal;

use refusal::refused;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// In a folder where what is not refused would leave its files.
fn tallow(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tallow"))
        .args(args)
        .current_dir(refusal::place())
        .env("RUST_BACKTRACE", "1")
        .output()
        .expect("the binary runs")
}

/// Of a run with `settings`, which lie between semicolons.
fn refuses(settings: &str, needle: &str) {
    let mut args = vec!["train", "--set", "train.max_updates=1"];
    settings.split("; ").for_each(|setting| args.extend(["--set", setting]));
    println!("{settings}");
    refused(&tallow(&args), needle);
}

fn refuses_each(rows: &[(&str, &str)]) {
    rows.iter().for_each(|(settings, needle)| refuses(settings, needle));
}

fn file(name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("settings-{name}"));
    fs::write(&path, content).expect("written");
    path
}

#[test]
fn arguments() {
    for (args, needle) in [
        (&["train", "--frobnicate"][..], "unexpected argument '--frobnicate' found"),
        (&["trian"], "unrecognized subcommand 'trian'"),
        (&["config"], "required arguments were not provided"),
        (&["config", "--schema", "--print-defaults"], "cannot be used with"),
        (&["train", "--resume", "x", "--out", "y"], "cannot be used with"),
        (&["train", "x.toml", "--resume", "y"], "cannot be used with"),
        (&["train", "--overwrite"], "--out"),
        (&["report"], "<FOLDER>"),
        (&["sample"], "<PATH>"),
        (&["sample", "x", "--tokens", "many"], "invalid value 'many' for '--tokens <TOKENS>'"),
        (&["data", "inspect"], "<PATH>"),
        (&["data", "bench", "--batches", "-1"], "'-1'"),
        (&["data", "bench", "--batches", "0"], "--batches is 0, 1 is the least"),
        (&["data", "bench", "no/such"], "data.source: `no/such` does not exist"),
        (&["data", "bench", "x.txt", "--set", "data.format=zip"], "data.format `zip` is unknown"),
    ] {
        println!("{args:?}");
        refused(&tallow(args), needle);
    }
    // What there is to say, and exit code 2.
    for args in [&[][..], &["data"]] {
        let output = tallow(args);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("Usage: tallow"), "{args:?}");
    }
}

#[test]
fn files_of_settings() {
    for (name, content, needle) in [
        ("syntax.toml", &b"[train]\nbatch = 3\nepochs = = 2\n"[..], "syntax.toml`, line 3:"),
        ("latin.toml", b"[train] # Z\xfcrich", "latin.toml`: stream did not contain valid UTF-8"),
        (
            "number.toml",
            b"train = 3\n",
            "number.toml`: `train` is 3, but it is a section: its keys stand below [train]",
        ),
        ("key.toml", b"[train]\nbtach = 3\n", "key.toml`: train.btach is unknown"),
    ] {
        let path = file(name, content);
        refused(&tallow(&["train", path.to_str().expect("UTF-8")]), needle);
    }
    refused(&tallow(&["train", "no-such.toml"]), "configuration `no-such.toml`: No such file");
    let number = file("override.toml", "train = 3\n");
    let number = number.to_str().expect("UTF-8");
    let batch = ["train", number, "--set", "train.batch=3"];
    refused(&tallow(&batch), "--set train.batch=3: `train` is not a section");
}

#[test]
fn names_and_kinds() {
    refuses_each(&[
        ("batch=3", "--set batch=3: an override is section.key=value"),
        ("train.batch", "--set train.batch: an override is section.key=value"),
        ("train.btach=3", "train.btach is unknown; did you mean `batch`?"),
        ("train.lr=3", "train.lr is unknown; there are batch, micro_batch,"),
        ("model.lora_ranks=3", "model.lora_ranks is unknown; did you mean `lora_rank`?"),
        ("trian.batch=3", "section `trian` is unknown; did you mean `train`?"),
        ("x.batch=3", "section `x` is unknown; there are model, data, train,"),
        ("train.batch=many", "train.batch is \"many\", it must be a whole number of at least 1"),
        ("train.batch=-1", "train.batch is -1, it must be a whole number of at least 1"),
        ("train.batch=1.5", "train.batch is 1.5, it must be a whole number"),
        ("train.seed=-1", "train.seed is -1, it must be a whole number of at least 0"),
        ("train.micro_batch=few", "it must be a whole number of at least 1, or \"auto\""),
        ("train.learning_rate=fast", "train.learning_rate is \"fast\", it must be a number"),
        ("data.augment=1", "data.augment is 1, it must be true or false"),
        ("data.source=3", "data.source is 3, it must be a text"),
        ("data.image_size=[3, 4, 5]", "it must be two whole numbers, [height, width]"),
        ("data.image_size=[3, -4]", "it must be two whole numbers, [height, width]"),
        ("data.store=x", "data.store is \"x\", it must be names with a text each"),
        ("memory.budget=true", "memory.budget is true, it must be a number of bytes, or a text"),
        ("memory.forbid=8bit", "memory.forbid is \"8bit\", it must be a list of texts"),
        ("precision.keep_f32=[1]", "precision.keep_f32 is [1], it must be a list of texts"),
        ("precision.loss_scale=high", "it must be a number, or one of dynamic, off"),
        ("precision.compute=true", "it must be one of f32, bf16, f16, fp8"),
        ("precision.compute=fp4", "precision.compute `fp4` is unknown; there are f32, bf16,"),
        ("model.name=vgg", "model.name `vgg` is unknown; there are resnet-digits, resnet18,"),
        ("optimizer.name=adagrad", "optimizer.name `adagrad` is unknown; there are adamw, adam,"),
        ("optimizer.state=4bit", "optimizer.state `4bit` is unknown; there are f32, bf16, 8bit"),
        ("train.schedule=stairs", "train.schedule `stairs` is unknown; there are constant,"),
        ("data.on_corrupt=hide", "data.on_corrupt `hide` is unknown; there are fail, skip"),
    ]);
}

#[test]
fn training() {
    refuses_each(&[
        ("train.learning_rate=nan", "train.learning_rate is NaN, it must be above 0 and finite"),
        ("train.learning_rate=0.0", "train.learning_rate is 0, it must be above 0 and finite"),
        ("train.clip_norm=0.0", "train.clip_norm is 0, it must be above 0 and finite"),
        ("train.skip_above_norm=inf", "train.skip_above_norm is inf, it must be above 0"),
        ("train.ema_decay=1", "train.ema_decay is 1, it must be at least 0 and below 1"),
        (
            "train.ema_decay=0.9; precision.compute=bf16; precision.masters=false",
            "train.ema_decay is given, but precision.masters is false: an average needs f32",
        ),
        ("train.label_smoothing=2.0", "label_smoothing is 2"),
        ("train.early_stop_epochs=0", "a run of 0 updates: early_stop_epochs is 0"),
        (
            "train.max_updates=9999; train.warmup_updates=9999",
            "train.warmup_updates is 9999, it must be less than the run's 1410 updates",
        ),
        (
            "train.micro_batch=auto; train.accumulate=2",
            "train.micro_batch is auto, but train.accumulate fixes it",
        ),
        (
            "train.micro_batch=auto; optimizer.release_gradients=true",
            "train.micro_batch is auto, but optimizer.release_gradients needs one micro-batch",
        ),
        (
            "optimizer.release_gradients=true; train.accumulate=2",
            "optimizer.release_gradients is true, but a batch of 32 in micro-batches of 16 keeps sums",
        ),
        ("checkpoint.every=0", "checkpoint.every is 0 updates, 1 is the least"),
        (
            "checkpoint.every=1; checkpoint.keep=0",
            "checkpoint.every is given, but checkpoint.keep is 0: none would stay",
        ),
    ]);
}

#[test]
fn precision_and_optimizer() {
    refuses_each(&[
        (
            "precision.masters=false",
            "precision.masters is false, but f32 weights are their own masters",
        ),
        (
            "precision.compute=fp8; precision.masters=false",
            "precision.masters is false, but fp8 weights need masters; use bf16",
        ),
        (
            "precision.keep_f32=[\"fc.*\"]",
            "precision.keep_f32 is given, but everything computes in f32",
        ),
        (
            "precision.compute=bf16; precision.keep_f32=[\"layer9.*\"]",
            "precision.keep_f32 `layer9.*` matches no parameter of the model",
        ),
        ("precision.loss_scale=0", "precision.loss_scale: "),
        ("optimizer.momentum=0.9", "optimizer.momentum is given, but adamw has none"),
        ("optimizer.nesterov=true", "optimizer.nesterov is given, but adamw has none"),
        ("optimizer.name=lion; optimizer.eps=1e-8", "optimizer.eps is given, but lion has none"),
        ("optimizer.name=sgd; optimizer.beta1=0.9", "optimizer.beta1 is given, but sgd has none"),
        (
            "optimizer.name=adafactor; optimizer.beta2=0.9",
            "optimizer.beta2 is given, but adafactor has none",
        ),
        (
            "optimizer.name=sgd; optimizer.state=8bit",
            "optimizer.state is 8bit, but sgd without momentum keeps none",
        ),
        (
            "optimizer.name=sgd; memory.offload_dir=.",
            "memory.offload_dir is given, but sgd without momentum keeps no state",
        ),
        ("optimizer.name=adafactor; optimizer.state=8bit", "Adafactor keeps its state in f32"),
        ("optimizer.beta1=-0.1", "beta1 is -0.1"),
        ("optimizer.beta2=1.0", "beta2 is 1"),
        ("optimizer.eps=0", "eps is 0"),
        ("optimizer.weight_decay=-1", "weight_decay is -1"),
        ("optimizer.name=sgd; optimizer.momentum=1", "momentum is 1"),
        ("optimizer.name=sgd; optimizer.nesterov=true", "momentum is 0, it must be above 0"),
    ]);
}

#[test]
fn memory() {
    let number = "no number of bytes; write 512MiB, 1.5GiB, 800MB or 4096";
    refuses_each(&[
        ("memory.budget=lots", &format!("memory.budget: `lots` is {number}")),
        ("memory.budget=1.2.3GiB", &format!("memory.budget: `1.2.3GiB` is {number}")),
        ("memory.budget=9000000000GiB", "`9000000000GiB` is more bytes than 64 bits hold"),
        ("memory.budget=0", "memory.budget: 0 bytes hold nothing"),
        ("memory.budget=1", "nothing fits 1 bytes: the smallest needs"),
        (
            "memory.budget=20MiB; model.name=gpt2; data.source=synthetic",
            "nothing fits 20971520 bytes: the weights of the model alone are 497759232",
        ),
        ("memory.recompute=some", "memory.recompute: `some` is unknown; there are none, all,"),
        ("memory.recompute=every:x", "memory.recompute: `x` is no number of segments"),
        ("memory.recompute=every:0", "memory.recompute: every:0 makes no group"),
        ("memory.recompute=bytes:x", &format!("memory.recompute: `x` is {number}")),
        ("memory.recompute=named:layer9", "`layer9` matches no segment; there are "),
        ("memory.recompute=planned", "memory.recompute is planned, which needs memory.budget"),
        (
            "memory.saved_inputs=bf16",
            "memory.saved_inputs is given, but memory.recompute is none: no segment runs again",
        ),
        (
            "memory.check_recompute=true",
            "memory.check_recompute is given, but memory.recompute is none: no segment runs again",
        ),
        (
            "memory.recompute=all; memory.saved_inputs=disk",
            "memory.saved_inputs: `disk` is unknown; there are kept, bf16 and file:FOLDER",
        ),
        (
            "memory.recompute=all; memory.saved_inputs=file:/no/such",
            "memory.saved_inputs: `/no/such` is no folder",
        ),
        ("memory.offload_dir=/no/such", "memory.offload_dir `/no/such`: No such file"),
        ("memory.forbid=[\"bf16\"]", "memory.forbid is given, but without memory.budget"),
        ("memory.prefer=[\"bf16\"]", "memory.prefer is given, but without memory.budget"),
    ]);
    let budget = "memory.budget=1GiB; ";
    for (settings, needle) in [
        ("memory.forbid=[\"8bits\"]", "memory.forbid `8bits` is unknown; there are "),
        ("memory.prefer=[\"speed\"]", "memory.prefer `speed` is unknown; there are "),
        ("memory.prefer=[\"bf16\", \"bf16\"]", "memory.prefer names `bf16` twice"),
        (
            "memory.forbid=[\"bf16\"]; precision.compute=bf16",
            "memory.forbid has `bf16`, but precision.compute is given and not planned",
        ),
        (
            "memory.forbid=[\"8bit\"]; optimizer.state=8bit",
            "memory.forbid has `8bit`, but optimizer.state is given and not planned",
        ),
        (
            "memory.forbid=[\"accumulate\"]; train.micro_batch=8",
            "memory.forbid has `accumulate`, but train.micro_batch is given and not planned",
        ),
        (
            "memory.forbid=[\"accumulate\"]; train.accumulate=2",
            "memory.forbid has `accumulate`, but train.accumulate is given and not planned",
        ),
        (
            "memory.forbid=[\"recompute\"]; memory.recompute=all",
            "memory.forbid has `recompute`, but memory.recompute is given and not planned",
        ),
    ] {
        refuses(&format!("{budget}{settings}"), needle);
    }
    refused(&tallow(&["train", "--budget", "lots"]), "memory.budget: `lots` is no number of bytes");
    refused(&tallow(&["plan", "--budget", "1MiB"]), "nothing fits 1048576 bytes");
}

#[test]
fn models() {
    refuses_each(&[
        ("model.vocab=3", "model.vocab is given, but resnet-digits has none"),
        ("model.name=vit; model.context=3", "model.context is given, but vit has none"),
        ("model.model_dim=3", "model.model_dim is given, but resnet-digits has none"),
        ("model.hidden_dim=3", "model.hidden_dim is given, but resnet-digits has none"),
        ("model.n_layers=3", "model.n_layers is given, but resnet-digits has none"),
        ("model.n_heads=3", "model.n_heads is given, but resnet-digits has none"),
        ("model.name=gpt2; model.n_kv_heads=3", "model.n_kv_heads is given, but gpt2 has none"),
        ("model.name=gpt2; model.tied=true", "model.tied is given, but gpt2 has none"),
        ("model.name=llama; model.patch=3", "model.patch is given, but llama has none"),
        ("model.name=llama; model.dropout=0.1", "model.dropout is given, but llama has none"),
        ("model.name=gpt2; model.n_layers=0", "model.n_layers is 0, 1 is the least"),
        (
            "model.name=gpt2; model.vocab=9000000000000000000",
            "model.vocab is 9000000000000000000, 2147483648 is the most",
        ),
        (
            "model.name=gpt2; model.model_dim=1048576; model.n_heads=8",
            "model: 1.6e14 parameters, 1e12 is the most",
        ),
        ("model.name=gpt2; model.n_heads=7", "model.n_heads 7 does not divide model.model_dim 768"),
        ("model.name=vit; model.n_heads=7", "model.n_heads 7 does not divide model.model_dim 768"),
        ("model.name=llama; model.n_heads=7", "model.n_heads 7 does not divide model.model_dim"),
        (
            "model.name=llama; model.n_heads=4; model.n_kv_heads=3; data.source=synthetic",
            "n_kv_heads 3 does not divide n_heads 4",
        ),
        (
            "model.name=gpt2; model.dropout=1.5",
            "model.dropout is 1.5, it must be from 0 to below 1",
        ),
        ("model.name=vit; model.dropout=-1", "model.dropout is -1, it must be from 0 to below 1"),
        ("model.name=vit; model.patch=5", "patch"),
        ("model.lora_alpha=1", "model.lora_alpha is given, but model.lora_rank is not"),
        ("model.lora_targets=[\"*\"]", "model.lora_targets is given, but model.lora_rank is not"),
        ("model.lora_dropout=0.1", "model.lora_dropout is given, but model.lora_rank is not"),
        ("model.lora_rank=1", "model.lora_rank: resnet-digits takes no adapters"),
        (
            "model.name=gpt2; model.lora_rank=1",
            "model.lora_rank is 1, but model.weights names no weights that adapters could stand on",
        ),
    ]);
}

#[test]
fn sources() {
    let gpt2 = "model.name=gpt2; data.source=synthetic; ";
    for (settings, needle) in [
        ("data.seq_tokens=0", "data.seq_tokens is 0, 1 is the least"),
        ("data.seq_tokens=1025", "data.seq_tokens 1025 is more than model.context 1024"),
        (
            "data.image_size=[8, 8]",
            "data.image_size is given, but data.source synthetic for gpt2 has none",
        ),
        (
            "data.n_classes=3",
            "data.n_classes is given, but data.source synthetic for gpt2 has none",
        ),
        ("data.n_samples=0", "data.n_samples is 0, 1 is the least"),
        ("data.n_samples=3000000000", "data.n_samples is 3000000000, 2147483648 is the most"),
    ] {
        refuses(&format!("{gpt2}{settings}"), needle);
    }
    // Each key that these sources do not have.
    for (key, value) in [
        ("seq_tokens", "3"),
        ("format", "tar"),
        ("augment", "true"),
        ("on_corrupt", "skip"),
        ("max_skipped", "3"),
        ("prefetch_bytes", "1MiB"),
        ("image_column", "x"),
        ("label_column", "x"),
        ("text_column", "x"),
        ("labels", "x.npy"),
        ("tokenizer", "x.json"),
        ("separator", "x"),
        ("cache_dir", "x"),
        ("cache_bytes", "1MiB"),
        ("store", "{ a = \"b\" }"),
    ] {
        for (source, named) in [("digits", "digits"), ("synthetic", "synthetic for resnet-digits")]
        {
            let needle = format!("data.{key} is given, but data.source {named} has none");
            refuses(&format!("data.source={source}; data.{key}={value}"), &needle);
        }
    }
    refuses_each(&[
        ("data.n_samples=3", "data.n_samples is given, but data.source digits has none"),
        ("data.image_size=[8, 8]", "data.image_size is given, but data.source digits has none"),
        ("data.n_classes=3", "data.n_classes is given, but data.source digits has none"),
        ("data.held_out=0", "data.held_out is 0, accuracy needs at least 1 sample"),
        ("data.source=synthetic; data.n_classes=1", "data.n_classes is 1, 2 is the least"),
        ("data.source=synthetic; data.image_size=[0, 8]", "data.image_size is 0 x 8"),
        (
            "data.source=synthetic; data.image_size=[8, 70000]",
            "data.image_size is 8 x 70000, 65536 is the most",
        ),
        (
            "model.name=gpt2",
            "model.name is gpt2, which learns tokens; data.source `digits` has images",
        ),
    ]);
}
