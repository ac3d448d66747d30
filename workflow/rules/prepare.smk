# The demo's model and data, or a check of the given ones.
rule assets:
    output:
        RUN.assets.file,
    log:
        LOGS / "assets.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    params:
        section=section("model", "data", "seed"),
        config=RUN.config,
    shell:
        'shakedown assets --config {params.config:q} --out "$(dirname {output:q})" 2>&1 | tee {log:q}'
