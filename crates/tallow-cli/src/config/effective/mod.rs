//! What a checked configuration comes to: every value in force, as a configuration of its own.

mod data;

use super::{Config, Decay, Optimizer, Precision, network::Network};
use tallow_train::{
    Gradients,
    accum::Clip,
    optim::{Algorithm, Place, Rounding, StateFormat},
    plan::Knob,
    precision::{Policy, Rule},
    recompute::{Check, Saved},
};
use toml::{Table, Value};

/// What a plan has chosen of a configuration's choices.
pub(crate) struct Choice {
    /// Place in [`Config::precisions`].
    pub(crate) precision: usize,
    /// Place in [`Config::optimizers`].
    pub(crate) optimizer: usize,
    /// Samples a micro-batch.
    pub(crate) micro_batch: usize,
}

impl Config {
    /// Every value in force, with the plan's choice or else the preferred one. Read as a configuration
    /// it means the same; only what recomputes is still planned where it was.
    pub(crate) fn effective(&self, choice: Option<&Choice>) -> Table {
        let first = Choice { precision: 0, optimizer: 0, micro_batch: self.micro_batches[0] };
        let choice = choice.unwrap_or(&first);
        let optimizer = &self.optimizers[choice.optimizer];
        let sections = [
            ("model", self.model_section()),
            ("data", data::section(&self.source)),
            ("train", self.train_section(choice, optimizer)),
            ("precision", precision(&self.precisions[choice.precision])),
            ("memory", self.memory_section(optimizer)),
            ("optimizer", self.optimizer_section(optimizer)),
            ("checkpoint", self.checkpoint_section()),
        ];
        sections.into_iter().map(|(name, section)| (name.to_string(), section.into())).collect()
    }

    fn model_section(&self) -> Table {
        let mut table = network(&self.model.network);
        if let Some(weights) = &self.model.weights {
            put(&mut table, "weights", weights.path().display().to_string());
        }
        if let Some(lora) = &self.model.lora {
            put(&mut table, "lora_rank", lora.rank as i64);
            put(&mut table, "lora_alpha", lora.alpha);
            put(&mut table, "lora_targets", lora.targets.clone());
            put(&mut table, "lora_dropout", lora.dropout);
        }
        table
    }

    fn train_section(&self, choice: &Choice, optimizer: &Optimizer) -> Table {
        let mut table = Table::new();
        put(&mut table, "batch", self.batch as i64);
        match self.auto_micro_batch {
            true => put(&mut table, "micro_batch", "auto"),
            false => put(&mut table, "micro_batch", choice.micro_batch as i64),
        }
        put(&mut table, "epochs", self.epochs as i64);
        put_if(&mut table, "max_updates", self.max_updates.map(|n| n as i64));
        put(&mut table, "seed", self.seed as i64);
        put(&mut table, "learning_rate", optimizer.config.learning_rate);
        let schedule = match self.decay {
            Decay::Constant => "constant",
            Decay::Linear => "linear",
            Decay::Cosine => "cosine",
        };
        put(&mut table, "schedule", schedule);
        put(&mut table, "warmup_updates", self.warmup_updates as i64);
        if let Clip::Norm(norm) = self.clip {
            put(&mut table, "clip_norm", norm);
        }
        if self.skip_above_norm.is_finite() {
            put(&mut table, "skip_above_norm", self.skip_above_norm);
        }
        put(&mut table, "label_smoothing", self.label_smoothing);
        put_if(&mut table, "ema_decay", self.ema_decay);
        put_if(&mut table, "early_stop_epochs", self.early_stop_epochs.map(|n| n as i64));
        table
    }

    fn memory_section(&self, optimizer: &Optimizer) -> Table {
        let mut table = Table::new();
        put_if(&mut table, "budget", self.budget.map(|bytes| bytes as i64));
        put(&mut table, "recompute", self.recompute_name.clone());
        if self.recompute_name != "none" {
            put(&mut table, "saved_inputs", saved(&self.saved));
        }
        put(&mut table, "check_recompute", self.check == Check::Bitwise);
        if let Place::File { path, .. } = &optimizer.config.place {
            let folder = path.parent().unwrap_or(path);
            put(&mut table, "offload_dir", folder.display().to_string());
        }
        for (key, knobs) in [("prefer", &self.prefer), ("forbid", &self.forbid)] {
            // The others are decided here, and must not be forbidden as well.
            let open = knobs.iter().filter(|k| matches!(k, Knob::Recompute | Knob::Offload));
            let names: Vec<String> = open.map(|knob| knob.name().to_string()).collect();
            put_if(&mut table, key, (!names.is_empty()).then_some(names));
        }
        table
    }

    fn optimizer_section(&self, optimizer: &Optimizer) -> Table {
        let mut table = algorithm(&optimizer.config.algorithm);
        let keeps_none = matches!(optimizer.config.algorithm, Algorithm::Sgd { momentum, .. } if momentum == 0.0);
        let state = match optimizer.config.format {
            StateFormat::F32 => "f32",
            StateFormat::Bf16(_) => "bf16",
            StateFormat::Bits8 { .. } => "8bit",
        };
        put_if(&mut table, "state", (!keeps_none).then_some(state));
        put(&mut table, "weight_decay", optimizer.config.weight_decay);
        put(&mut table, "release_gradients", self.gradients == Gradients::Released);
        table
    }

    fn checkpoint_section(&self) -> Table {
        let mut table = Table::new();
        put_if(&mut table, "every", self.checkpoint_every.map(|n| n as i64));
        put(&mut table, "keep", self.keep as i64);
        table
    }
}

fn put(table: &mut Table, key: &str, value: impl Into<Value>) {
    table.insert(key.to_string(), value.into());
}

fn put_if(table: &mut Table, key: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        put(table, key, value);
    }
}

fn network(network: &Network) -> Table {
    let mut table = Table::new();
    put(&mut table, "name", network.name());
    let mut sizes = |sizes: &[(&str, usize)]| {
        sizes.iter().for_each(|(key, size)| put(&mut table, key, *size as i64));
    };
    match network {
        Network::ResNet(_) => {}
        Network::Vit(config, patch) => {
            sizes(&[
                ("model_dim", config.model_dim),
                ("hidden_dim", config.hidden_dim),
                ("n_layers", config.n_layers),
                ("n_heads", config.n_heads),
            ]);
            put_if(&mut table, "patch", patch.map(|patch| patch as i64));
            put(&mut table, "dropout", config.dropout);
        }
        Network::Gpt2(config) => {
            sizes(&[
                ("vocab", config.vocab),
                ("context", config.context),
                ("model_dim", config.model_dim),
                ("n_layers", config.n_layers),
                ("n_heads", config.n_heads),
            ]);
            put(&mut table, "dropout", config.dropout);
        }
        Network::Llama(config) => {
            sizes(&[
                ("vocab", config.vocab),
                ("context", config.context),
                ("model_dim", config.model_dim),
                ("hidden_dim", config.hidden_dim),
                ("n_layers", config.n_layers),
                ("n_heads", config.n_heads),
                ("n_kv_heads", config.n_kv_heads),
            ]);
            put(&mut table, "tied", config.tied);
        }
    }
    table
}

fn precision(precision: &Precision) -> Table {
    let mut table = Table::new();
    let compute = precision.name.split(' ').next().unwrap_or(&precision.name);
    put(&mut table, "compute", compute);
    match precision.loss_scale.state().rule {
        Rule::Dynamic(_) => put(&mut table, "loss_scale", "dynamic"),
        Rule::Fixed { scale: 1.0, .. } => put(&mut table, "loss_scale", "off"),
        Rule::Fixed { scale, .. } => put(&mut table, "loss_scale", f64::from(scale)),
    }
    put(&mut table, "masters", precision.weights == Rounding::Nearest);
    let Policy { overrides, .. } = &precision.policy;
    let kept: Vec<String> = overrides.iter().map(|kept| kept.pattern.clone()).collect();
    put_if(&mut table, "keep_f32", (!kept.is_empty()).then_some(kept));
    table
}

fn saved(saved: &Saved) -> String {
    match saved {
        Saved::AsIs | Saved::Host => "kept".to_string(),
        Saved::Bf16 => "bf16".to_string(),
        Saved::File(folder) => format!("file:{}", folder.display()),
    }
}

fn algorithm(algorithm: &Algorithm) -> Table {
    let mut table = Table::new();
    let mut name = |name: &str, numbers: &[(&str, f64)]| {
        put(&mut table, "name", name);
        numbers.iter().for_each(|(key, x)| put(&mut table, key, *x));
    };
    match *algorithm {
        Algorithm::AdamW { beta1, beta2, eps } => {
            name("adamw", &[("beta1", beta1), ("beta2", beta2), ("eps", eps)]);
        }
        Algorithm::Adam { beta1, beta2, eps } => {
            name("adam", &[("beta1", beta1), ("beta2", beta2), ("eps", eps)]);
        }
        Algorithm::Lion { beta1, beta2 } => name("lion", &[("beta1", beta1), ("beta2", beta2)]),
        Algorithm::Sgd { momentum, nesterov } => {
            name("sgd", &[("momentum", momentum)]);
            put(&mut table, "nesterov", nesterov);
        }
        Algorithm::Adafactor { .. } => name("adafactor", &[]),
    }
    table
}
