# Training stages: train under supervision, diagnose what happened, accept or fail.
rule train:
    input:
        stage_inputs,
        stage_assets,
    output:
        RUN.stage("{stage}").outcome,
    log:
        LOGS / "train_{stage}.log",
    wildcard_constraints:
        stage="|".join(STAGES),
    conda:
        "../envs/shakedown.yaml"
    threads: stage_threads
    resources:
        **placement(),
        exclude_file=str(RUN.excluded_nodes),
        node_file=checked_nodes(),
        nodes=stage_nodes,
        gpu=stage_gpus,
    params:
        section=stage_section,
        run=RUN.root,
        assets=RUN.assets.file,
        config=RUN.config,
    shell:
        # A stage that hung or failed writes its outcome and evidence: the gate fails, not this job.
        # One that was told to stop writes none: this job fails and the next one resumes. The stop's
        # signal reaches this shell and tee too: they wait for the stage to save its state.
        "trap : INT TERM; "
        "{{ trap : INT TERM; "
        "shakedown train {wildcards.stage:q} --config {params.config:q} "
        "--assets {params.assets:q} --run-dir {params.run:q} || [ -s {output:q} ]; }} 2>&1 "
        "| {{ trap '' INT TERM; exec tee {log:q}; }}"


rule diagnose:
    input:
        rules.train.output,
    output:
        verdict=RUN.stage("{stage}").diagnosis,
        page=report(
            RUN.stage("{stage}").diagnosis_html,
            caption="../report/diagnosis.rst",
            category="4 Training",
            labels={"stage": "{stage}", "result": "diagnosis"},
        ),
    log:
        LOGS / "diagnose_{stage}.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    params:
        stage=stage_root,
    shell:
        "{{ shakedown hang diagnose --stage {params.stage:q} "
        "|| [ -s {output.verdict:q} ]; }} 2>&1 | tee {log:q}"


rule accept_stage:
    input:
        outcome=rules.train.output,
        diagnosis=rules.diagnose.output.verdict,
        made_of=stage_files,
    output:
        RUN.stage("{stage}").accepted,
    log:
        LOGS / "accept_{stage}.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    shell:
        "shakedown accept {input.outcome:q} --diagnosis {input.diagnosis:q} "
        "--remove-on-fail {input.outcome:q} --out {output:q} 2>&1 | tee {log:q}"
